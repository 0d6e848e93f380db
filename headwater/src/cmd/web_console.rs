//! `headwater console`: prints or opens a one-time link to the web console.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use headwater_api::{ConsoleLink, CreateConsoleTicket};

use crate::cli::ConsoleArgs;
use crate::client::Client;
use crate::show;

/// The program that opens a page in the user's browser.
const OPENER: &str = "xdg-open";

/// Prints a link, and opens it if there is a desktop.
pub async fn run(client: Client, args: ConsoleArgs, json: bool) -> anyhow::Result<u8> {
    let link = client.console_link(&CreateConsoleTicket { role: args.role }).await?;
    check(&link.url)?;
    if json {
        show::json(&link)?;
        return Ok(0);
    }
    show::line(&link.url)?;
    show::aside("the link opens one session, and is valid for a minute\n");
    if client.data_dir().is_none() && is_loopback(&link.url) {
        // Only a warning: another process that listens on that port of this host would get the link.
        show::aside(
            "the console listens on the loopback interface of the server: forward its port first, for instance with ssh -L\n",
        );
        return Ok(0);
    }
    if let Some(dir) = desktop().filter(|_| !args.print) {
        open(&link, &dir).context("cannot open a browser (open the link yourself)")?;
    }
    Ok(0)
}

/// Opens a page whose URL is no secret, if there is a desktop.
pub fn browse(url: &str) {
    if desktop().is_none() {
        return;
    }
    let mut opener = Command::new(OPENER);
    opener.arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // If this fails, the user can open the printed link.
    let _ = opener.spawn();
}

/// Fails if the text is not a link, because it is put into a page and printed on a terminal.
fn check(url: &str) -> anyhow::Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ":/.#=_-[]".contains(c);
    anyhow::ensure!(
        (url.starts_with("http://") || url.starts_with("https://")) && url.chars().all(is_plain),
        "the daemon did not answer with a link to a console"
    );
    Ok(())
}

fn is_loopback(url: &str) -> bool {
    ["http://127.", "http://[::1]", "http://localhost"].iter().any(|start| url.starts_with(start))
}

/// The user's private runtime directory, if there is a desktop.
fn desktop() -> Option<PathBuf> {
    let is_set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    is_set("WAYLAND_DISPLAY").or_else(|| is_set("DISPLAY"))?;
    let programs = std::env::var_os("PATH")?;
    std::env::split_paths(&programs).find(|dir| dir.join(OPENER).is_file())?;
    is_set("XDG_RUNTIME_DIR").map(PathBuf::from)
}

/// Opens a page that redirects to the link. The link is a secret, and all users of the host can read the arguments of
/// a program.
fn open(link: &ConsoleLink, dir: &Path) -> anyhow::Result<()> {
    let page = dir.join("headwater-console.html");
    match std::fs::remove_file(&page) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
        _ => {}
    }
    let mut file: File = File::options().write(true).create_new(true).mode(0o600).open(&page)?;
    let url = &link.url;
    writeln!(
        file,
        "<!doctype html><meta charset=\"utf-8\"><title>Headwater</title><meta http-equiv=\"refresh\" content=\"0;url={url}\">"
    )?;
    let mut opener = Command::new(OPENER);
    opener.arg(&page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    opener.spawn().map(drop).context(OPENER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_page_with_the_link_is_for_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("headwater-console.html");
        std::fs::write(&page, "old").unwrap();
        let link = ConsoleLink { url: "http://127.0.0.1:1/#ticket=x".to_owned(), expires_at_ms: 0 };
        // The result depends on whether there is a browser here.
        let _ = open(&link, dir.path());
        assert_eq!(std::fs::metadata(&page).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(std::fs::read_to_string(&page).unwrap().contains("url=http://127.0.0.1:1/#ticket=x\""));
    }
}
