//! Logins of people with a real identity provider, by the command line and in a browser.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use headwater_testkit::wait_until;
use serde_json::Value;

use crate::support::{Daemon, Ran, headwater, run, short_dir};
use crate::web_console::browser::Browser;

/// `tests/oidc/provider.mjs`.
struct Provider {
    issuer: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Provider {
    fn start() -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oidc");
        assert!(
            dir.join("node_modules/oidc-provider").is_dir(),
            "the identity provider of this test is missing: 'make test' installs it, or run 'npm ci' in {}",
            dir.display()
        );
        let mut command = Command::new("node");
        command.arg("provider.mjs").current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("node starts");
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut provider = Self { issuer: String::new(), child, input, output: BufReader::new(output) };
        provider.issuer = provider.line();
        assert!(provider.issuer.starts_with("http://127.0.0.1:"), "{}", provider.issuer);
        provider
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.output.read_line(&mut line).unwrap() > 0, "the identity provider ended");
        line.trim_end().to_owned()
    }

    fn command(&mut self, command: &str) {
        self.input.write_all(format!("{command}\n").as_bytes()).unwrap();
        assert_eq!(self.line(), "done", "{command}");
    }

    /// A daemon whose people log in here.
    fn daemon(&self, dir: tempfile::TempDir, listen: &str) -> Daemon {
        Daemon::start_in(dir, |command| {
            command.args(["--listen", listen, "--console", "127.0.0.1:0", "--oidc-client-id", "headwater"]);
            command.args(["--oidc-issuer", &self.issuer, "--oidc-role", "staff=viewer"]);
            command.args(["--oidc-role", "teachers=operator catalog:class-*"]);
        })
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn url_of(daemon: &Daemon, name: &str) -> String {
    let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
    status[name].as_str().unwrap().to_owned()
}

/// A person at another host.
struct Person(tempfile::TempDir);

impl Person {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = headwater();
        command.args(args).current_dir(self.0.path());
        command.env("XDG_CONFIG_HOME", self.0.path()).env_remove("HEADWATER_DATA_DIR");
        command.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY");
        command
    }

    fn cli(&self, args: &[&str]) -> Ran {
        run(&mut self.command(args))
    }

    /// Logs in with curl as the browser. Returns the result of the command, and the page that the browser shows last.
    fn login(&self, url: &str) -> (Ran, String) {
        let mut command = self.command(&["login", url, "--oidc", "--name", "lab"]);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut err = String::new();
        errors.read_line(&mut err).unwrap();
        let mut page = String::new();
        if let Some((_, link)) = err.trim_end().split_once("with a browser on this computer: ") {
            // An empty list of cookies switches cookies on.
            let browser = run(Command::new("curl").args(["-sSL", "--max-time", "60", "-b", ""]).arg(link));
            page = browser.ok();
            err.clear();
        }
        errors.read_to_string(&mut err).unwrap();
        let output = child.wait_with_output().unwrap();
        (Ran { err, ..Ran::from(output) }, page)
    }
}

#[test]
fn people_log_in_with_the_command_line_and_only_those_with_a_role() {
    let mut provider = Provider::start();
    let daemon = provider.daemon(short_dir(), "127.0.0.1:0");
    let url = url_of(&daemon, "api_url");
    let person = Person(tempfile::tempdir().unwrap());

    let (ran, page) = person.login(&url);
    let said = ran.ok();
    assert!(said.contains("logged in to lab") && said.contains("operator for catalog:class-*"), "{said}");
    assert!(page.contains("return to the terminal"), "{page}");
    person.cli(&["machine", "list"]).ok();
    person.cli(&["token", "list"]).fails(1, &["token anna--4711-", "this needs admin"]);
    let events = daemon.cli(&["events"]).ok();
    assert!(events.contains("oidc anna (4711)") && events.contains("logged in"), "{events}");
    assert!(!events.contains("hwt_") && !events.contains("eyJ"), "a secret is in the history: {events}");

    // The end of this login ends its token, not only the user's memory of it.
    let token = std::fs::read_to_string(person.0.path().join("headwater/contexts.json")).unwrap();
    let token = token.split('"').find(|text| text.starts_with("hwt_")).unwrap().to_owned();
    let said = person.cli(&["logout"]).ok();
    assert!(said.contains("logged out of lab: its token is not valid any more"), "{said}");
    person.cli(&["logout"]).fails(2, &["no login to end", "--context"]);
    std::fs::write(person.0.path().join("token"), token).unwrap();
    person.cli(&["login", &url, "--token-file", "token"]).fails(1, &["no such token"]);
    person.login(&url).0.ok();

    // Other keys sign. The daemon asks for them, but not twice in a second.
    provider.command("keys");
    wait_until("a login with the new keys", || person.login(&url).0.code == 0);

    provider.command("person 4712");
    person.login(&url).0.fails(1, &["ben (4712) has no role here", "--oidc-role"]);
    assert!(daemon.cli(&["events"]).ok().contains("login: ben (4712) has no role here"));
    provider.command("nobody");
    let (ran, page) = person.login(&url);
    ran.fails(1, &["the identity provider refuses the login: access_denied not today"]);
    assert!(page.contains("You are not logged in"), "{page}");
    person.cli(&["machine", "list"]).ok();

    // Without the identity provider, logins of before still work, also after a restart of the daemon.
    let address = url.trim_start_matches("http://").to_owned();
    let issuer = provider.issuer.clone();
    let (_, dir) = daemon.terminate();
    let daemon = provider.daemon(dir, &address);
    drop(provider);
    person
        .login(&url)
        .0
        .fails(1, &["cannot log in: cannot ask the identity provider", &issuer, "log in again later"]);
    person.cli(&["machine", "list"]).ok();

    let tokens: Value = serde_json::from_str(&daemon.cli(&["--json", "token", "list"]).ok()).unwrap();
    for token in tokens["tokens"].as_array().unwrap() {
        assert_eq!(token["created_by"], "oidc anna (4711)");
        daemon.cli(&["token", "revoke", token["name"].as_str().unwrap()]).ok();
    }
    person.cli(&["machine", "list"]).fails(1, &["there is no such token, or it was revoked"]);
}

#[test]
fn people_log_in_at_the_console_in_a_browser() {
    let mut provider = Provider::start();
    provider.command("nobody");
    let daemon = provider.daemon(short_dir(), "127.0.0.1:0");
    let url = url_of(&daemon, "console_url");
    let logins = || {
        let tokens: Value = serde_json::from_str(&daemon.cli(&["--json", "token", "list"]).ok()).unwrap();
        tokens["tokens"].as_array().unwrap().len()
    };
    let button = |name: &str| {
        format!("[...document.querySelectorAll('button')].find(it => it.innerText.startsWith('{name}'))")
    };
    let press = |browser: &mut Browser, name: &str| {
        browser.wait(&format!("{}?.disabled === false", button(name)));
        browser.value(&format!("{}.click()", button(name)));
    };
    let mut browser = Browser::start();
    browser.open(&url);
    press(&mut browser, "Log in at 127.0.0.1:");
    browser.wait("document.body.innerText.includes('refuses the login: access_denied not today')");
    assert_eq!(logins(), 0);
    provider.command("person 4713");
    press(&mut browser, "Log in at 127.0.0.1:");
    browser
        .wait("document.body.innerText.includes('Overview') && document.body.innerText.includes('viewer')");
    // Nothing of the login is left in the address or in the browser.
    assert_eq!(browser.value("location.href"), format!("{url}#/"));
    assert_eq!(browser.value("Object.keys(localStorage) + Object.keys(sessionStorage)"), "");
    assert_eq!(browser.value("window.violations.join()"), "");
    assert_eq!(logins(), 1);
    press(&mut browser, "Sign out");
    wait_until("the login has ended", || logins() == 0);

    // The answer to a login that this page did not begin.
    browser.open(&format!("{url}?code=4711&state=abc"));
    browser.wait("document.body.innerText.includes('This page did not begin this login')");
    assert_eq!(logins(), 0);
}
