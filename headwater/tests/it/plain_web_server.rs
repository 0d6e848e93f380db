//! The store behind a plain web server: nginx with the block of `docs/http-store.md`, word for word but for its places.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{self, Daemon, headwater, pseudo_random, run, signal};
use headwater_testkit::pki::{Authority, CertificateOptions};
use headwater_testkit::wait_until;

/// The one block of nginx's configuration that the document has.
fn documented() -> &'static str {
    const DOCUMENT: &str = include_str!("../../../docs/http-store.md");
    let mut blocks = DOCUMENT.split("```nginx\n").skip(1);
    let block = blocks.next().expect("docs/http-store.md has a block of nginx's configuration");
    assert!(blocks.next().is_none(), "docs/http-store.md has a second block of nginx's configuration");
    block.split("```").next().unwrap()
}

/// The same with the places of a test, and for those who show a token if this is wanted.
fn configured(root: &Path, port: u16, with_tokens: bool) -> String {
    let place = |path: &str| root.join(path).display().to_string();
    let mut block = documented().to_owned();
    let asks = "if ($http_authorization";
    for (theirs, ours) in [
        ("listen 443 ssl;", format!("listen 127.0.0.1:{port} ssl;")),
        ("/etc/ssl/images.example.pem", place("tls/server-cert.pem")),
        ("/etc/ssl/images.example.key", place("tls/server-key.pem")),
        ("root /srv;", format!("root {};", root.display())),
        (&format!("# {asks}"), if with_tokens { asks.to_owned() } else { format!("# {asks}") }),
    ] {
        assert_eq!(block.matches(theirs).count(), 1, "'{theirs}' in docs/http-store.md");
        block = block.replace(theirs, &ours);
    }
    block
}

/// nginx with a configuration, until this is dropped.
struct Nginx(Child);

impl Nginx {
    /// Serves at a port that is free, with what is in the block `http` of its configuration, and keeps its files below `root`.
    fn start(root: &Path, block: impl Fn(u16) -> String) -> (Self, u16) {
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let start = |port| Self::start_at(root, port, &block(port)).map(|nginx| (nginx, port));
        (0..5).find_map(|_| start(free())).expect("nginx finds a port")
    }

    fn start_at(root: &Path, port: u16, block: &str) -> Option<Self> {
        let place = |path: &str| root.join(path).display().to_string();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary: String =
            temporary.iter().map(|kind| format!("{kind}_temp_path {};\n", place("temporary"))).collect();
        let whole = format!(
            "daemon off; worker_processes 1; pid {}; error_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}{block}\n}}\n",
            place("pid")
        );
        std::fs::write(root.join("nginx.conf"), whole).unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("nginx");
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).args(["-e", "stderr", "-c"]);
        let child = command.arg(root.join("nginx.conf")).stdin(Stdio::null()).spawn();
        let mut child = child.expect("nginx runs (Debian package nginx-light)");
        let mut ended = None;
        wait_until("nginx listens", || {
            ended = child.try_wait().unwrap();
            ended.is_some() || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        });
        ended.is_none().then_some(Self(child))
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Killed, it would leave its worker.
        signal(self.0.id(), "TERM");
        let _ = self.0.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn import(daemon: &Daemon, dir: &Path, seed: u64) {
    let raw = dir.join("disk.raw");
    std::fs::write(&raw, pseudo_random(2 << 20, seed)).unwrap();
    daemon.cli(&["image", "import", text(&raw), "--name", "disk"]).ok();
}

#[test]
fn nginx_serves_a_store_with_the_configuration_of_the_document() {
    let dir = support::short_dir();
    let (golden, tls) = (dir.path().join("golden"), dir.path().join("tls"));
    let data_dir = support::short_dir();
    let daemon = Daemon::start_in(data_dir, |command| {
        command.args(["--store", text(&golden)]);
    });
    import(&daemon, dir.path(), 1);
    // What the document says to open it to nginx's process.
    run(Command::new("chmod").args(["-R", "go+rX"]).arg(&golden)).ok();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    Authority::new("here")
        .write_certificates(&tls, &[("server", "localhost", CertificateOptions::default())]);
    let (nginx, port) = Nginx::start(dir.path(), |port| configured(dir.path(), port, false));
    let (host, authority) = (format!("https://localhost:{port}"), tls.join("ca-cert.pem"));
    let url = format!("{host}/golden");
    let store = |args: &[&str]| {
        run(headwater().env("NO_PROXY", "localhost").arg("store").args(args).args(["--ca", text(&authority)]))
    };

    assert!(store(&["verify", &url, "disk"]).ok().contains("disk@1 is intact"));
    // A daemon that writes there goes on meanwhile.
    import(&daemon, dir.path(), 2);
    assert!(store(&["verify", &url, "disk@2"]).ok().contains("disk@2 is intact"));
    let copy = dir.path().join("copy");
    assert!(store(&["copy", &url, text(&copy), "disk@1", "disk@2"]).ok().contains("2 versions copied"));
    let copied = run(headwater().args(["store", "verify", text(&copy)])).ok();
    assert!(copied.contains("disk@1 is intact") && copied.contains("disk@2 is intact"), "{copied}");
    // Without a list of images they must be named.
    let unnamed = store(&["verify", &url]);
    assert_ne!(unnamed.code, 0, "{unnamed:?}");

    // Status, and header where there is one, of a request with these arguments.
    let asked = |path: &str, args: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--noproxy", "*", "--cacert", text(&authority)]);
        curl.args(["--output", "/dev/null", "--write-out", "%{http_code} %header{cache-control}"]);
        run(curl.args(args).arg(format!("{host}{path}"))).ok()
    };
    let manifest = std::fs::read_dir(golden.join("manifests")).unwrap().next().unwrap().unwrap().file_name();
    let manifest = format!("/golden/manifests/{}", manifest.to_str().unwrap());
    assert_eq!(asked("/golden/store", &[]), "200 no-cache");
    assert_eq!(asked("/golden/images/disk", &["--head"]), "200 no-cache");
    assert_eq!(asked(&manifest, &[]), "200 public, max-age=31536000, immutable");
    assert!(asked(&manifest, &["--range", "0-0"]).starts_with("206 "));
    for other in ["/golden/lock", "/golden/", "/golden/images/", "/golden/tmp/x", "/tls/server-key.pem", "/"]
    {
        assert!(asked(other, &[]).starts_with("404"), "{other}");
    }
    assert!(asked("/golden/store", &["--request", "PUT", "--data", "x"]).starts_with("403"));

    // With its line for tokens, it is for those who show one.
    drop(nginx);
    let (_nginx, port) = Nginx::start(dir.path(), |port| configured(dir.path(), port, true));
    let url = format!("https://localhost:{port}/golden");
    let token = dir.path().join("token");
    for (shown, is_let_in) in [("token-2", true), ("token-3", false)] {
        std::fs::write(&token, shown).unwrap();
        let verified = store(&["verify", &url, "disk", "--token", text(&token)]);
        assert_eq!(verified.code == 0, is_let_in, "{verified:?}");
    }
    store(&["verify", &url, "disk"]).fails(1, &["401"]);
}

#[test]
fn a_cache_before_a_server_goes_on_without_it() {
    let dir = support::short_dir();
    let golden = dir.path().join("golden");
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--store", text(&golden)]);
    });
    import(&daemon, dir.path(), 3);
    daemon.terminate();
    let mut origin = headwater();
    origin.args(["store", "serve", text(&golden), "--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
    let mut origin = origin.spawn().unwrap();
    let mut url = String::new();
    BufReader::new(origin.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let url = url.trim().to_owned();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    // What is named by its hash it keeps because of the headers that come with it, and the rest because it is told to.
    let block = |port: u16| {
        let cache = dir.path().join("cache").display().to_string();
        format!(
            "proxy_cache_path {cache} keys_zone=golden:1m max_size=1g;\n\
             server {{\n listen 127.0.0.1:{port};\n proxy_cache golden; proxy_http_version 1.1; proxy_set_header Connection '';\n \
             location / {{ proxy_pass {url}/; }}\n \
             location ~ ^/(store$|images/) {{ proxy_pass {url}; proxy_ignore_headers Cache-Control; proxy_cache_valid 200 1s; \
             proxy_cache_use_stale error timeout; }}\n}}"
        )
    };
    let (_nginx, port) = Nginx::start(dir.path(), block);
    let copy = |to: &str| {
        let to = dir.path().join(to);
        let args = ["store", "copy", &format!("http://127.0.0.1:{port}"), text(&to), "disk@1"];
        run(headwater().env("NO_PROXY", "127.0.0.1").args(args)).ok();
        run(headwater().args(["store", "verify", text(&to)])).ok()
    };
    assert!(copy("first").contains("disk@1 is intact"));
    signal(origin.id(), "TERM");
    origin.wait().unwrap();
    assert!(TcpStream::connect(url.trim_start_matches("http://")).is_err(), "the server goes on");
    assert!(copy("second").contains("disk@1 is intact"));
}
