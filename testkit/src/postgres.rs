//! A real PostgreSQL server for a test, on a socket in a directory of its own.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::program::{output, succeed};
use crate::wait::wait_until;

/// Ends the server and removes its directory as soon as the test program has ended, in whatever way: the pipe
/// is closed then.
const KEEPER: &str = r#"dir=$1; shift; "$@" </dev/null & server=$!; read -r _; kill -QUIT $server 2>/dev/null; wait $server; [ -e "$dir/keep" ] || rm -rf "$dir""#;

/// PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

/// A server. It ends when this is dropped, or with the test program.
pub struct Postgres {
    dir: PathBuf,
    keeper: Option<Child>,
    settings: Vec<String>,
}

/// The directory of the programs of the newest installed release.
fn programs() -> PathBuf {
    let releases = std::fs::read_dir("/usr/lib/postgresql").ok().into_iter().flatten().flatten();
    let newest = releases
        .filter_map(|entry| {
            Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path().join("bin")))
        })
        .filter(|(_, bin)| bin.join("initdb").exists())
        .max();
    newest.expect("PostgreSQL is missing: install Debian's package 'postgresql'").1
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// A command line that runs a program of PostgreSQL as an unprivileged user.
fn unprivileged(program: &Path) -> Vec<String> {
    let program = program.display().to_string();
    if !is_root() {
        return vec![program];
    }
    let user = NOBODY.to_string();
    ["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups", &program].map(str::to_owned).to_vec()
}

impl Postgres {
    /// The server that all tests of this program share. Each test creates a database of its own.
    pub fn shared() -> &'static Self {
        static SERVER: OnceLock<Postgres> = OnceLock::new();
        SERVER.get_or_init(|| Self::start(&[]))
    }

    /// A server of its own, with additional settings: `max_connections=20`.
    pub fn start(settings: &[&str]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Short: the path of a socket has 107 bytes at most.
        let dir = std::env::temp_dir().join(format!("hw-pg-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        if is_root() {
            chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let words = unprivileged(&programs().join("initdb"));
        let data = dir.join("data");
        let mut initdb = Command::new(&words[0]);
        initdb.args(&words[1..]).arg("-D").arg(&data).current_dir(&dir).env("LC_ALL", "C");
        succeed(
            "postgresql",
            initdb.args([
                "-U",
                "postgres",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
                "--no-instructions",
            ]),
        );
        // The user `locked` needs a password.
        std::fs::write(data.join("pg_hba.conf"), "local all locked scram-sha-256\nlocal all all trust\n")
            .unwrap();
        let mut server =
            Self { dir, keeper: None, settings: settings.iter().map(|&it| it.to_owned()).collect() };
        server.restart();
        server
    }

    /// Starts it again after [`Postgres::kill`].
    pub fn restart(&mut self) {
        let words = unprivileged(&programs().join("postgres"));
        let mut command = Command::new("sh");
        command.args(["-c", KEEPER, "sh"]).arg(&self.dir).args(words).arg("-D").arg(self.dir.join("data"));
        command.arg("-k").arg(&self.dir).args(["-h", ""]);
        let fast = ["fsync=off", "full_page_writes=off", "shared_buffers=16MB", "logging_collector=off"];
        for setting in fast.into_iter().chain(self.settings.iter().map(String::as_str)) {
            command.args(["-c", setting]);
        }
        let log = std::fs::File::options().create(true).append(true).open(self.dir.join("log")).unwrap();
        command.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log);
        self.keeper = Some(command.spawn().unwrap());
        let is_up = || self.psql("postgres", "SELECT 1").is_ok();
        wait_until("PostgreSQL answers", is_up);
    }

    /// Kills it, like a crash of its host.
    pub fn kill(&mut self) {
        let file = std::fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let pid = file.lines().next().unwrap().to_owned();
        // Its children would serve for a moment longer.
        let children = succeed("procps", Command::new("ps").args(["-o", "pid=", "--ppid", &pid]));
        std::fs::write(self.dir.join("keep"), "").unwrap();
        let mut kill = Command::new("kill");
        // Some may have ended by themselves.
        let _ = output("procps", kill.args(["-KILL", &pid]).args(children.split_whitespace()));
        if let Some(mut keeper) = self.keeper.take() {
            drop(keeper.stdin.take());
            keeper.wait().unwrap();
        }
        std::fs::remove_file(self.dir.join("keep")).unwrap();
    }

    /// The directory of its socket.
    pub fn socket_dir(&self) -> &Path {
        &self.dir
    }

    /// Runs SQL as an administrator.
    pub fn psql(&self, database: &str, sql: &str) -> io::Result<String> {
        let mut command = Command::new(programs().join("psql"));
        command.args([
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "postgres",
            "-d",
            database,
            "-c",
            sql,
        ]);
        let done = command.arg("-h").arg(&self.dir).stdin(Stdio::null()).output()?;
        match done.status.success() {
            true => Ok(String::from_utf8_lossy(&done.stdout).trim_end().to_owned()),
            false => Err(io::Error::other(String::from_utf8_lossy(&done.stderr).into_owned())),
        }
    }

    /// The same; it must succeed.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        self.psql(database, sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// Creates an empty database, and returns its name.
    pub fn new_database(&self) -> String {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("test{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    /// The URL of a database.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@/{database}?host={}", self.dir.display())
    }

    /// Dumps a database as `pg_dump` does.
    pub fn dump(&self, database: &str) -> String {
        let mut command = Command::new(programs().join("pg_dump"));
        command.args(["-U", "postgres", "-d", database, "-h"]).arg(&self.dir);
        let text = succeed("postgresql", &mut command);
        // Each dump has a random key in these lines.
        let is_content = |line: &&str| !line.starts_with("\\restrict") && !line.starts_with("\\unrestrict");
        text.lines().filter(is_content).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(mut keeper) = self.keeper.take() {
            drop(keeper.stdin.take());
            let _ = keeper.wait();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
