//! `headwater machine cp`: copies a file into or out of a guest, with commands that the guest agent runs.
//!
//! A file is copied into a guest in pieces of [`MAX_STDIN_BYTES`], to a temporary file beside the target, which is
//! renamed at the end. Copying out of a guest works in the same way. The guest needs a POSIX shell.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_api::{ExecRequest, MAX_STDIN_BYTES, Problem, ProblemKind};
use headwater_block::size;

use crate::client::Client;
use crate::failure::invalid;
use crate::show::{self, progress::Shown};

/// The number of bytes that one command reads in the guest: the agent returns at most 16 MiB.
const PIECE_BYTES: u64 = 8 << 20;

/// The script that creates the temporary file. Its arguments: the target, the file's name if the target is a
/// directory, and its mode. Prints the target.
const BEGIN: &str = r#"to=$1; case $to in */) to=$to$2 ;; *) [ ! -d "$to" ] || to=$to/$2 ;; esac
: >"$to.headwater-part" && chmod "$3" "$to.headwater-part" && printf %s "$to""#;
const APPEND: &str = r#"cat >>"$1.headwater-part""#;
/// The script that renames the temporary file. Fails if its length is not that of the sent file.
const FINISH: &str =
    r#"had=$(wc -c <"$1.headwater-part") && [ "$had" -eq "$2" ] && mv -f -- "$1.headwater-part" "$1""#;
const GIVE_UP: &str = r#"rm -f -- "$1.headwater-part""#;
/// The script that prints the size of a file, following links.
const SIZE: &str = r#"[ -f "$1" ] || { echo "$1 is not an existing file" >&2; exit 1; }; wc -c <"$1""#;
const PIECE: &str = r#"dd if="$1" bs=8388608 skip="$2" count=1 2>/dev/null"#;

/// A file in a guest.
struct InGuest<'a> {
    machine: &'a str,
    path: &'a str,
}

impl<'a> InGuest<'a> {
    /// Parses `NAME:PATH`. Text with a slash before the colon is a local file.
    fn parse(text: &'a str) -> Option<Self> {
        let (machine, path) = text.split_once(':')?;
        (!machine.is_empty() && !machine.contains('/')).then_some(Self { machine, path })
    }
}

/// Copies the file.
pub async fn run(client: &Client, from: &str, to: &str, json: bool) -> anyhow::Result<()> {
    let (place, bytes) = match (InGuest::parse(from), InGuest::parse(to)) {
        (None, Some(guest)) => into_guest(client, Path::new(from), &absolute(guest)?, json).await?,
        (Some(guest), None) => out_of_guest(client, &absolute(guest)?, Path::new(to), json).await?,
        (Some(_), Some(_)) => {
            return Err(invalid(
                "both are files in guests: copy the file here first, and then into the other guest",
            ));
        }
        (None, None) => {
            return Err(invalid(format!(
                "neither '{from}' nor '{to}' is in a guest: write NAME:/PATH for the file there"
            )));
        }
    };
    if json {
        return show::json(&serde_json::json!({ "copied": place, "bytes": bytes }));
    }
    show::line(&format!("copied to {}, {}", show::printable(&place), size::format(bytes)))
}

fn absolute(guest: InGuest<'_>) -> anyhow::Result<InGuest<'_>> {
    if guest.path.starts_with('/') {
        return Ok(guest);
    }
    Err(invalid(format!(
        "'{}' is not an absolute path in the guest of {}: write {0}:/PATH",
        guest.machine, guest.machine
    )))
}

/// Runs a script in the guest and returns its output. A script that fails is an error.
async fn sh(
    client: &Client,
    machine: &str,
    script: &str,
    arguments: &[&str],
    input: Option<&[u8]>,
) -> anyhow::Result<Vec<u8>> {
    let mut argv = ["sh", "-c", script, "sh"].map(str::to_owned).to_vec();
    argv.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    let timeout_ms = ExecRequest::default_timeout_ms();
    let request = ExecRequest { argv, timeout_ms, stdin_base64: input.map(|bytes| STANDARD.encode(bytes)) };
    let result = client.exec(machine, &request).await?;
    let decode = |text: &str| STANDARD.decode(text).context("the daemon's answer is not valid Base64");
    if result.exit_code != 0 || result.truncated {
        let said = String::from_utf8_lossy(&decode(&result.stderr_base64)?).trim().to_owned();
        let why = if said.is_empty() { format!("exit code {}", result.exit_code) } else { said };
        let message = format!("the command in the guest of {machine} failed: {}", show::printable(&why));
        return Err(Problem::new(ProblemKind::Failed, message).into());
    }
    decode(&result.stdout_base64)
}

async fn into_guest(
    client: &Client,
    from: &Path,
    to: &InGuest<'_>,
    json: bool,
) -> anyhow::Result<(String, u64)> {
    let failed = || format!("cannot copy {} to {}:{}", from.display(), to.machine, to.path);
    let mut file = File::open(from).with_context(failed)?;
    let metadata = file.metadata().with_context(failed)?;
    let name = from.file_name().and_then(|name| name.to_str());
    let (true, Some(name)) = (metadata.is_file(), name) else {
        return Err(invalid(format!(
            "{}: it is not a regular file; pack a directory with tar first",
            failed()
        )));
    };
    let mode = format!("{:o}", metadata.permissions().mode() & 0o777);
    let begun = sh(client, to.machine, BEGIN, &[to.path, name, &mode], None).await.with_context(failed)?;
    let place = String::from_utf8(begun).with_context(failed)?;
    let sent = send(client, &mut file, metadata.len(), (to.machine, &place), json).await;
    if sent.is_err() {
        // Ignored, because the first error matters.
        let _ = sh(client, to.machine, GIVE_UP, &[&place], None).await;
    }
    Ok((format!("{}:{place}", to.machine), sent.with_context(failed)?))
}

async fn send(
    client: &Client,
    file: &mut File,
    total_bytes: u64,
    (machine, place): (&str, &str),
    json: bool,
) -> anyhow::Result<u64> {
    let mut shown = Shown::begin(&format!("copy to {machine}, {}", size::format(total_bytes)), json);
    let mut sent = 0;
    let most = u64::try_from(MAX_STDIN_BYTES)?;
    loop {
        let mut piece = Vec::new();
        Read::by_ref(file).take(most).read_to_end(&mut piece)?;
        if piece.is_empty() {
            break;
        }
        sh(client, machine, APPEND, &[place], Some(&piece)).await?;
        sent += u64::try_from(piece.len())?;
        shown.read(sent);
    }
    shown.end();
    let had = sent.to_string();
    sh(client, machine, FINISH, &[place, &had], None).await.map(|_| sent)
}

async fn out_of_guest(
    client: &Client,
    from: &InGuest<'_>,
    to: &Path,
    json: bool,
) -> anyhow::Result<(String, u64)> {
    let failed = || format!("cannot copy {}:{} to {}", from.machine, from.path, to.display());
    let name = from.path.rsplit('/').next().filter(|name| !name.is_empty());
    let Some(name) = name else { return Err(invalid(format!("{}: it is a directory", failed()))) };
    let to: PathBuf = if to.is_dir() { to.join(name) } else { to.to_owned() };
    if to.metadata().is_ok_and(|there| !there.is_file()) {
        return Err(invalid(format!("{}: {} is not a regular file", failed(), to.display())));
    }
    let said = sh(client, from.machine, SIZE, &[from.path], None).await.with_context(failed)?;
    let total: u64 = String::from_utf8_lossy(&said).trim().parse().with_context(failed)?;
    let mut part = to.clone().into_os_string();
    part.push(".headwater-part");
    let part = PathBuf::from(part);
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&part).with_context(failed)?;
    let received = receive(client, &mut file, total, from, json).await;
    let received = received.and_then(|()| Ok(std::fs::rename(&part, &to)?));
    if received.is_err() {
        // Ignored, because the first error matters.
        let _ = std::fs::remove_file(&part);
    }
    received.with_context(failed)?;
    Ok((to.display().to_string(), total))
}

async fn receive(
    client: &Client,
    file: &mut File,
    total: u64,
    from: &InGuest<'_>,
    json: bool,
) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("copy from {}, {}", from.machine, size::format(total)), json);
    let mut received = 0;
    for piece in 0..total.div_ceil(PIECE_BYTES) {
        let bytes = sh(client, from.machine, PIECE, &[from.path, &piece.to_string()], None).await?;
        file.write_all(&bytes)?;
        received += u64::try_from(bytes.len())?;
        shown.read(received);
    }
    shown.end();
    anyhow::ensure!(
        received == total,
        "the file changed while it was copied: it had {total} bytes, but {received} were received"
    );
    Ok(file.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_before_a_colon_is_a_machine() {
        let parse = |text: &'static str| InGuest::parse(text).map(|it| (it.machine, it.path));
        assert_eq!(parse("lab:/etc/motd"), Some(("lab", "/etc/motd")));
        assert_eq!(parse("lab:a:b"), Some(("lab", "a:b")));
        for here in ["/srv/a:b", "./a:b", "a", ":a"] {
            assert_eq!(parse(here), None, "{here}");
        }
    }
}
