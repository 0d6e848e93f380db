//! The command line of another host: TLS, `headwater login` and contexts.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::support::{self, Daemon, Ran, headwater, run};
use headwater_testkit::pki::{Authority, CertificateOptions};
use serde_json::Value;

/// A daemon that others reach.
struct Server {
    daemon: Daemon,
    url: String,
    fingerprint: String,
}

impl Server {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(args: &[&str]) -> Self {
        // All addresses are not the loopback interface, so this speaks TLS.
        let daemon = Daemon::start_in(support::short_dir(), |command| {
            command.args(["--listen", "0.0.0.0:0"]).args(args);
        });
        let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
        let port = status["api_url"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
        let fingerprint = status["fingerprint"].as_str().unwrap_or_default().to_owned();
        Self { daemon, url: format!("https://127.0.0.1:{port}"), fingerprint }
    }

    fn token(&self, name: &str, role: &str) -> String {
        self.daemon.cli(&["token", "create", name, "--role", role]).ok().trim().to_owned()
    }
}

/// A user of another host.
struct User(tempfile::TempDir);

impl User {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn cli(&self, args: &[&str]) -> Ran {
        let mut command = headwater();
        command.args(args).current_dir(self.0.path());
        command.env("XDG_CONFIG_HOME", self.0.path()).env_remove("HEADWATER_DATA_DIR");
        run(&mut command)
    }

    fn contexts(&self) -> PathBuf {
        self.0.path().join("headwater/contexts.json")
    }

    fn login(&self, url: &str, token: &str, more: &[&str]) -> Ran {
        let file = self.0.path().join("token");
        std::fs::write(&file, format!("{token}\n")).unwrap();
        self.cli(&[&["login", url, "--token-file", "token"], more].concat())
    }
}

#[test]
fn a_user_of_another_host_logs_in_and_works_until_the_token_is_revoked() {
    let server = Server::start();
    let Server { daemon, url, fingerprint } = &server;
    daemon.with_tiny_machine("lab");
    let (user, token) = (User::new(), server.token("anna", "operator"));
    // A server that nobody vouches for gets no token.
    user.login(url, &token, &[]).fails(1, &["its fingerprint is", fingerprint, "headwater status"]);
    let wrong = format!("sha256:{}", "0".repeat(64));
    user.login(url, &token, &["--fingerprint", &wrong]).fails(1, &["does not have the fingerprint", &wrong]);
    user.login(url, "hwt_nothing", &["--fingerprint", fingerprint]).fails(1, &["no such token"]);
    assert!(!user.contexts().exists());
    let said = user.login(url, &token, &["--fingerprint", fingerprint, "--name", "lab1"]).ok();
    assert!(said.contains("logged in to lab1") && said.contains("token anna, operator"), "{said}");
    let mode = std::fs::metadata(user.contexts()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    assert!(user.cli(&["machine", "list"]).ok().contains("lab"));
    user.cli(&["machine", "start", "lab", "--wait"]).ok();
    assert!(user.cli(&["machine", "console", "lab", "--log"]).ok().contains("login:"));
    user.cli(&["machine", "stop", "lab", "--force"]).ok();
    assert!(daemon.history("lab").contains("token anna"));
    // It may not do everything, and files are those of the server.
    user.cli(&["image", "remove", "tiny", "--force"]).fails(1, &["operator", "admin"]);
    user.cli(&["image", "import", "./disk.raw", "--name", "new"]).fails(2, &["so 127.0.0.1 cannot open it"]);

    // A token that an administrator made outlives a logout.
    let said = user.cli(&["logout"]).ok();
    assert!(said.contains("removed lab1; its token or certificate stays valid"), "{said}");
    assert!(!std::fs::read_to_string(user.contexts()).unwrap().contains(&token));
    user.login(url, &token, &["--fingerprint", fingerprint, "--name", "lab1"]).ok();

    daemon.cli(&["token", "revoke", "anna"]).ok();
    user.cli(&["machine", "list"]).fails(1, &["no such token, or it was revoked"]);
}

#[test]
fn commands_go_to_the_context_that_was_chosen() {
    let (first, second) = (Server::start(), Server::start());
    let user = User::new();
    for (name, server) in [("one", &first), ("two", &second)] {
        let token = server.token("anna", "viewer");
        let known = ["--fingerprint", server.fingerprint.as_str(), "--name", name];
        user.login(&server.url, &token, &known).ok();
        assert!(!user.cli(&["context", "list"]).ok().contains(&token));
    }
    let data_dir = |args: &[&str]| {
        let status: Value =
            serde_json::from_str(&user.cli(&[&["--json", "status"], args].concat()).ok()).unwrap();
        status["data_dir"].as_str().unwrap().to_owned()
    };
    let own = |server: &Server| server.daemon.path().display().to_string();
    assert_eq!((data_dir(&[]), data_dir(&["--context", "one"])), (own(&second), own(&first)));
    // A data directory that is named is that of a daemon of this host.
    assert_eq!(data_dir(&["--data-dir", &own(&first)]), own(&first));
    user.cli(&["context", "use", "one"]).ok();
    assert_eq!(data_dir(&[]), own(&first));
    user.cli(&["context", "use", "three"]).fails(3, &["no context 'three'", "one, two, local"]);
    user.cli(&["--context", "three", "status"]).fails(3, &["no context 'three'"]);
    user.cli(&["context", "remove", "one"]).ok();
    let listed = user.cli(&["context", "list"]).ok();
    assert!(!listed.contains("one") && listed.contains("two") && listed.contains("*"), "{listed}");
    std::fs::write(user.contexts(), "{").unwrap();
    user.cli(&["context", "list"]).fails(6, &["contexts.json"]);
}

#[test]
fn a_client_certificate_works_instead_of_a_secret_until_its_token_is_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let expired = CertificateOptions { is_expired: true, ..Default::default() };
    let roles = [("anna", "anna", CertificateOptions::default()), ("late", "late", expired)];
    let files = Authority::new("People").write_certificates(dir.path(), &roles);
    // Another authority signed a certificate for the same name.
    let others = Authority::new("Others").write_certificates(&dir.path().join("others"), &roles);
    let file = |name: &str| files.join(name).display().to_string();
    let other = |name: &str| others.join(name).display().to_string();
    let (certificate, key) = (file("anna-cert.pem"), file("anna-key.pem"));
    let server = Server::start();
    let create = |name: &str, certificate: &str| {
        server.daemon.cli(&["token", "create", name, "--role", "operator", "--certificate", certificate])
    };
    create("late", &file("late-cert.pem")).fails(2, &["the certificate expired at 2002"]);
    create("key", &key).fails(2, &["has a private key, which must not leave this host"]);
    let said = create("anna", &certificate).ok();
    assert!(said.contains("operator") && said.contains("for the certificate sha256:"), "{said}");
    create("twice", &certificate).fails(4, &["token 'anna' belongs to the same certificate"]);

    let user = User::new();
    let login = |certificate: &str, key: &str| {
        let known = ["login", &server.url, "--fingerprint", &server.fingerprint];
        user.cli(&[&known[..], &["--certificate", certificate, "--key", key]].concat())
    };
    let unknown = "there is no token for the client certificate sha256:";
    login(&other("anna-cert.pem"), &other("anna-key.pem")).fails(1, &[unknown, "token create"]);
    login(&certificate, &other("anna-key.pem")).fails(2, &["cannot use the certificate", "anna-key.pem"]);
    login(&file("none.pem"), &key).fails(3, &["cannot read", "none.pem"]);
    login(&key, &key).fails(2, &["does not contain a certificate in PEM"]);
    let plain = ["login", "http://127.0.0.1:1", "--certificate", &certificate, "--key", &key];
    user.cli(&plain).fails(2, &["is not encrypted"]);
    assert!(!user.contexts().exists());
    let said = login(&certificate, &key).ok();
    assert!(said.contains("token anna, operator"), "{said}");
    user.cli(&["machine", "list"]).ok();
    user.cli(&["token", "list"]).fails(1, &["token anna has the role operator, and this needs admin"]);
    assert!(server.daemon.cli(&["token", "list"]).ok().contains("certificate"));
    server.daemon.cli(&["token", "revoke", "anna"]).ok();
    user.cli(&["machine", "list"]).fails(1, &[unknown]);
}

#[test]
fn a_certificate_of_an_authority_needs_no_fingerprint() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("Lab");
    let files = authority.write_certificates(dir.path(), &[("server", "127.0.0.1", Default::default())]);
    let file = |name: &str| files.join(name).display().to_string();
    let (certificate, key) = (file("server-cert.pem"), file("server-key.pem"));
    let server = Server::start_with(&["--tls-cert", &certificate, "--tls-key", &key]);
    assert_eq!(server.fingerprint, "");
    let (user, token) = (User::new(), server.token("anna", "viewer"));
    user.login(&server.url, &token, &[]).fails(1, &["is not trusted"]);
    user.login(&server.url, &token, &["--ca", &file("ca-cert.pem")]).ok();
    user.cli(&["status"]).ok();
    let other = Authority::new("Other").write_certificates(&dir.path().join("other"), &[]);
    let other = other.join("ca-cert.pem").display().to_string();
    user.login(&server.url, &token, &["--ca", &other]).fails(1, &["not signed by a known authority"]);
}

#[test]
fn what_is_not_a_server_is_said() {
    let user = User::new();
    user.login("http://lab1:9470", "x", &[]).fails(2, &["not encrypted"]);
    user.login("lab1", "x", &[]).fails(2, &["https://HOST:PORT"]);
    user.login("https://127.0.0.1:1", "x", &[])
        .fails(7, &["https://127.0.0.1:1", "nothing listens at this address"]);
    let odd = user.cli(&["login", "https://127.0.0.1:1", "--fingerprint", "abc"]);
    assert!(odd.code == 2 && odd.err.contains("64 hexadecimal digits"), "{odd:?}");
    // A port that speaks no TLS, and one of the loopback interface as a forwarded one.
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--listen", "127.0.0.1:0"]);
    });
    let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
    let url = status["api_url"].as_str().unwrap();
    user.login(&url.replace("http:", "https:"), "x", &[]).fails(1, &["cannot speak TLS"]);
    let token = std::fs::read_to_string(daemon.path().join("api.token")).unwrap();
    user.login(url, token.trim(), &[]).ok();
    user.cli(&["machine", "list"]).ok();
}
