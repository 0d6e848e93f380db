//! A real daemon in a directory of its own, an HTTP client for its socket, and a disk that boots in a moment.

pub mod disks;

use headwater_testkit::{Rng, wait_until};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The program under test.
pub fn headwater() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_headwater"));
    command.env_remove("HEADWATER_DATA_DIR").env_remove("HEADWATER_LOG").env_remove("NOTIFY_SOCKET");
    // The exports of tests are not among those of the user.
    command.env("HEADWATER_RUN_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/run"));
    command
}

/// The program under test, whose files can have `limit_bytes` each, as on a disk that is full then.
pub fn headwater_on_full_disk(limit_bytes: u64) -> Command {
    let mut shell = Command::new("sh");
    let script = format!("ulimit -f {}; exec \"$0\" \"$@\"", limit_bytes / 512);
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_headwater")]);
    shell.env_remove("HEADWATER_DATA_DIR").env_remove("HEADWATER_LOG").env_remove("NOTIFY_SOCKET");
    shell
}

/// What a command gave.
#[derive(Debug)]
#[must_use = "whether it succeeded has to be asked"]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Ran {
    /// The command must have succeeded.
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// The command must have failed like this, in one line that holds all of `words`.
    pub fn fails(self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        // On a busy host it may have said before how far it is and what it waits for, and a daemon's log what is slow.
        let is_log = |line: &&str| matches!(line.split_whitespace().nth(1), Some("INFO" | "WARN" | "ERROR"));
        let last = self.err.lines().rfind(|line| !is_log(line)).unwrap_or_default();
        let told = self.err.lines().filter(|line| line.starts_with("headwater: ")).count();
        assert!(told == 1 && last.starts_with("headwater: "), "{self:?}");
        for word in words {
            assert!(last.contains(word), "{word:?} is not in {self:?}");
        }
    }
}

pub fn run(command: &mut Command) -> Ran {
    command.stdin(Stdio::null()).output().expect("the program runs").into()
}

/// Data directories have short paths: sockets are in them.
pub fn short_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("hw").tempdir_in("/tmp").expect("/tmp can be written")
}

pub struct Daemon {
    pub dir: tempfile::TempDir,
    /// What it logged until it was ready.
    pub log: String,
    /// What it logged since.
    later: Arc<Mutex<String>>,
    child: Child,
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_in(short_dir(), |_| {})
    }

    pub fn start_in(dir: tempfile::TempDir, change: impl FnOnce(&mut Command)) -> Self {
        Self::start_as(headwater(), dir, change)
    }

    /// A daemon whose files can have `limit_bytes` each, as on a disk that is full then.
    pub fn start_on_full_disk(limit_bytes: u64) -> Self {
        Self::start_on_full_disk_in(short_dir(), limit_bytes)
    }

    pub fn start_on_full_disk_in(dir: tempfile::TempDir, limit_bytes: u64) -> Self {
        Self::start_as(headwater_on_full_disk(limit_bytes), dir, |_| {})
    }

    /// A daemon of another user, for root.
    pub fn start_as_user(user: u32) -> Self {
        Self::start_as_user_with(user, &[])
    }

    /// The same with more flags.
    pub fn start_as_user_with(user: u32, flags: &[&str]) -> Self {
        let dir = short_dir();
        std::os::unix::fs::chown(dir.path(), Some(user), Some(user)).expect("root may");
        // The program may lie where that user cannot go, so it is passed on open.
        let program = std::fs::File::open(env!("CARGO_BIN_EXE_headwater")).expect("the program");
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec /proc/self/fd/0 \"$@\"", "sh"]).current_dir("/").uid(user).gid(user);
        shell.env_remove("HEADWATER_DATA_DIR").env_remove("HEADWATER_LOG").env_remove("NOTIFY_SOCKET");
        Self::start_as(shell, dir, |command| {
            command.stdin(program).args(flags);
        })
    }

    /// A daemon in a network namespace of its own, which has the bridge `br0`, for root.
    pub fn start_with_bridge() -> Self {
        let mut shell = Command::new("unshare");
        let script = "ip link add br0 type bridge && ip link set br0 up && exec \"$0\" \"$@\"";
        shell.args(["--net", "sh", "-c", script, env!("CARGO_BIN_EXE_headwater")]);
        shell.env_remove("HEADWATER_DATA_DIR").env_remove("HEADWATER_LOG").env_remove("NOTIFY_SOCKET");
        Self::start_as(shell, short_dir(), |_| {})
    }

    /// Runs a command in the daemon's network namespace.
    pub fn in_network(&self, args: &[&str]) -> Ran {
        run(Command::new("nsenter").args(["--target", &self.pid().to_string(), "--net", "--"]).args(args))
    }

    fn start_as(mut command: Command, dir: tempfile::TempDir, change: impl FnOnce(&mut Command)) -> Self {
        command.args(["serve", "--data-dir"]).arg(dir.path()).stdin(Stdio::null()).stderr(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().expect("the daemon starts");
        let mut log = BufReader::new(child.stderr.take().expect("it has a log"));
        let mut seen = String::new();
        while !seen.contains("ready") {
            let n = log.read_line(&mut seen).expect("its log is text");
            assert!(n > 0, "the daemon ended: {seen}");
        }
        // Read on, or the pipe fills and the daemon waits.
        let later = Arc::new(Mutex::new(String::new()));
        let lines = log.lines().map_while(Result::ok);
        let kept = Arc::clone(&later);
        std::thread::spawn(move || lines.for_each(|line| *kept.lock().expect("no panic") += &(line + "\n")));
        Self { dir, log: seen, later, child }
    }

    /// Waits until it has logged a line with all of `words` since it was ready.
    pub fn wait_for_log(&self, words: &[&str]) {
        wait_until(format!("the log has {words:?}"), || {
            let later = self.later.lock().expect("no panic");
            later.lines().any(|line| words.iter().all(|word| line.contains(word)))
        });
    }

    /// How many lines with `words` it has logged since it was ready.
    pub fn count_in_log(&self, words: &str) -> usize {
        self.later.lock().expect("no panic").lines().filter(|line| line.contains(words)).count()
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn socket(&self) -> PathBuf {
        self.path().join("api.sock")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn cli(&self, args: &[&str]) -> Ran {
        run(headwater().arg("--data-dir").arg(self.path()).args(args))
    }

    /// `kill -9`; the directory stays.
    pub fn kill(mut self) -> tempfile::TempDir {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
        std::mem::replace(&mut self.dir, short_dir())
    }

    /// The process that has the disks. Its parent is the keeper, whose number is in the lock.
    pub fn disk_process(&self) -> u32 {
        wait_for_child(self.keeper())
    }

    /// The keeper of disks.
    pub fn keeper(&self) -> u32 {
        let keeper = std::fs::read_to_string(self.path().join("disks.lock")).expect("it has a keeper");
        keeper.parse().expect("a number")
    }

    /// `kill -9` of the daemon, the disk process, its keeper and all QEMUs, as by a crash of the host.
    pub fn kill_all(self) -> tempfile::TempDir {
        // The keeper first, or it starts another one.
        let disks = [self.keeper(), self.disk_process()].map(u64::from);
        let machines = self.cli(&["--json", "machine", "list"]).ok();
        let machines: serde_json::Value = serde_json::from_str(&machines).expect("JSON");
        let pids = machines["machines"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|machine| machine["pid"].as_u64());
        let pids: Vec<u64> = pids.chain(disks).collect();
        let dir = self.kill();
        for pid in &pids {
            signal(u32::try_from(*pid).expect("a process number"), "KILL");
        }
        wait_until("all of it has ended", || !pids.iter().any(|pid| is_alive(*pid)));
        dir
    }

    /// Waits until it has ended by itself. Returns how.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("it ends").code()
    }

    /// SIGTERM. Returns how it ended.
    pub fn terminate(mut self) -> (Option<i32>, tempfile::TempDir) {
        signal(self.pid(), "TERM");
        let code = self.child.wait().expect("it ends").code();
        (code, std::mem::replace(&mut self.dir, short_dir()))
    }

    /// A machine's field, of its JSON.
    pub fn machine(&self, name: &str) -> serde_json::Value {
        serde_json::from_str(&self.cli(&["--json", "machine", "show", name]).ok()).expect("JSON")
    }

    /// Waits until a machine is in a state.
    pub fn wait_for(&self, name: &str, state: &str) -> serde_json::Value {
        let mut last = serde_json::Value::Null;
        wait_until(format!("machine {name} is {state}"), || {
            last = self.machine(name);
            last["state"] == state
        });
        last
    }

    /// Imports the tiny disk as `tiny` and creates a machine of it.
    pub fn with_tiny_machine(&self, name: &str) {
        let disk = self.path().join("tiny.raw");
        std::fs::write(&disk, tiny_disk()).expect("the disk can be written");
        self.cli(&["image", "import", disk.to_str().expect("UTF-8")]).ok();
        self.create(name, "tiny", &[]);
    }

    /// Creates a machine whose write cache asks for less room than the usual one, which not every host has.
    pub fn create(&self, name: &str, image: &str, more: &[&str]) {
        // Not in whole pages, as anybody may say it.
        let small = ["machine", "create", name, image, "--memory", "67109864", "--disk", "1G"];
        self.cli(&[&small[..], more].concat()).ok();
    }

    /// The history of a machine, as people see it.
    pub fn history(&self, machine: &str) -> String {
        self.cli(&["events", "--subject", &format!("machine {machine}")]).ok()
    }

    /// Types on a machine's console, and reads until `expected` was printed, or with `None` until the machine ends.
    pub fn console(&self, name: &str, keys: &str, expected: Option<&str>) {
        let mut client = headwater()
            .arg("--data-dir")
            .arg(self.path())
            .args(["machine", "console", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the client starts");
        client.stdin.as_mut().expect("piped").write_all(keys.as_bytes()).expect("it reads");
        let mut out = client.stdout.take().expect("piped");
        let watchdog = Watchdog::on(client.id());
        let (mut seen, mut byte) = (String::new(), [0]);
        while expected.is_none_or(|expected| !seen.contains(expected)) {
            if out.read(&mut byte).expect("it prints") == 0 {
                assert_eq!(expected, None, "the console ended after {seen:?}");
                break;
            }
            seen.push(char::from(byte[0]));
        }
        drop(watchdog);
        client.kill().expect("it can be killed");
        client.wait().expect("it ends");
    }
}

/// Kills a process that a test would else wait for for ever.
pub struct Watchdog {
    /// Its end is what the watching thread waits for.
    _alive: std::sync::mpsc::Sender<()>,
}

impl Watchdog {
    pub fn on(pid: u32) -> Self {
        let (alive, gone) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            if gone.recv_timeout(Duration::from_secs(120)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                signal(pid, "KILL");
            }
        });
        Self { _alive: alive }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Twice: machines need no time to say goodbye.
            signal(self.pid(), "TERM");
            std::thread::sleep(Duration::from_millis(100));
            signal(self.pid(), "TERM");
            let _ = self.child.wait();
        }
    }
}

pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(status.expect("kill runs").success(), "cannot send {name} to {pid}");
}

/// The child of a process, once it has one.
pub fn wait_for_child(parent: u32) -> u32 {
    let list = format!("/proc/{parent}/task/{parent}/children");
    let child = || std::fs::read_to_string(&list).ok()?.split_whitespace().next()?.parse().ok();
    let mut found = None;
    wait_until("the keeper has a disk process", || {
        found = child();
        found.is_some()
    });
    found.expect("it was there")
}

pub fn is_alive(pid: u64) -> bool {
    // A zombie is not alive.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

/// What is in a directory, and below it, that others than the owner may use in any way.
pub fn open_to_others(dir: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let mut open = Vec::new();
    for entry in std::fs::read_dir(dir).expect("it can be listed") {
        let path = entry.expect("an entry").path();
        let metadata = std::fs::symlink_metadata(&path).expect("it is there");
        if metadata.is_dir() {
            open.append(&mut open_to_others(&path));
        }
        if metadata.permissions().mode() & 0o077 != 0 {
            open.push(path);
        }
    }
    open
}

/// A day of the week that is neither today nor next to it, in any time zone.
pub fn another_day() -> &'static str {
    let seconds =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_secs();
    // 1970-01-01 was a Thursday.
    let days = ["thu", "fri", "sat", "sun", "mon", "tue", "wed"];
    days[usize::try_from(seconds / 86_400 + 3).expect("a small number") % 7]
}

/// Bytes that nothing makes smaller.
pub fn pseudo_random(len: usize, seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(len)
}

/// A plain HTTP exchange over the socket. Returns status and body.
pub fn http(socket: &Path, method: &str, path: &str, body: Option<&str>) -> (u16, String) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        use http_body_util::{BodyExt, Full};
        let stream = tokio::net::UnixStream::connect(socket).await.expect("the daemon listens");
        let io = hyper_util::rt::TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.expect("HTTP");
        tokio::spawn(connection);
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(hyper::body::Bytes::from(body.unwrap_or_default().to_owned())))
            .expect("a request");
        let response = sender.send_request(request).await.expect("an answer");
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.expect("a whole answer").to_bytes();
        (status, String::from_utf8_lossy(&bytes).into_owned())
    })
}

/// Sends a request and returns the connection after the first piece of the answer has come.
pub fn begin(socket: &Path, method: &str, path: &str, body: &str) -> (UnixStream, String) {
    let mut stream = UnixStream::connect(socket).expect("the daemon listens");
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("it reads");
    let mut piece = vec![0; 4096];
    let n = stream.read(&mut piece).expect("it answers");
    piece.truncate(n);
    (stream, String::from_utf8_lossy(&piece).into_owned())
}

/// A disk whose boot sector prints how often its second sector was written, then `login: `, and then does what
/// the keys on the serial console say: `w` writes (and prints `W`), `r` restarts, `p` powers off, others echo.
pub fn tiny_disk() -> Vec<u8> {
    #[rustfmt::skip]
    const CODE: [u8; 161] = [
        // The firmware's timer interrupt reads the serial line too: without it the keys are ours.
        0xfa,                               // cli
        0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, // xor ax, ax; mov ds, ax; mov ss, ax
        0xbc, 0x00, 0x7c,                   // mov sp, 0x7c00
        0x88, 0x16, 0x00, 0x7e,             // mov [0x7e00], dl: the boot drive
        0xb4, 0x42, 0xe8, 0x51, 0x00,       // mov ah, 0x42; call disk: read sector 1 to 0x8000
        0xa0, 0x00, 0x80, 0x04, 0x30,       // mov al, [0x8000]; add al, '0'
        0xe8, 0x55, 0x00,                   // call put
        0xbe, 0x91, 0x7c,                   // mov si, text
        0xac, 0x84, 0xc0, 0x74, 0x05,       // next: lodsb; test al, al; jz keys
        0xe8, 0x4a, 0x00, 0xeb, 0xf6,       // call put; jmp next
        0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, // keys: in al, 0x3fd; test al, 1
        0x74, 0xf8,                         // jz keys
        0xba, 0xf8, 0x03, 0xec,             // in al, 0x3f8
        0x3c, b'w', 0x74, 0x0d,             // cmp al, 'w'; je write
        0x3c, b'r', 0x74, 0x19,             // cmp al, 'r'; je reset
        0x3c, b'p', 0x74, 0x1c,             // cmp al, 'p'; je power
        0xe8, 0x2d, 0x00, 0xeb, 0xe3,       // call put; jmp keys
        0xfe, 0x06, 0x00, 0x80,             // write: inc byte [0x8000]
        0xb4, 0x43, 0xe8, 0x16, 0x00,       // mov ah, 0x43; call disk: write sector 1
        0xb0, b'W', 0xe8, 0x1d, 0x00,       // mov al, 'W'; call put
        0xeb, 0xd3,                         // jmp keys
        0xba, 0xf9, 0x0c, 0xb0, 0x06, 0xee, 0xf4, // reset: out 0xcf9, 6; hlt
        0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4, // power: out 0x604, 0x2000 (ACPI S5); hlt
        0x8a, 0x16, 0x00, 0x7e,             // disk: mov dl, [0x7e00]
        0xbe, 0x81, 0x7c, 0x30, 0xc0,       // mov si, packet; xor al, al
        0xcd, 0x13, 0xc3,                   // int 0x13; ret
        0x88, 0xc4,                         // put: mov ah, al
        0xba, 0xfd, 0x03, 0xec, 0xa8, 0x20, // in al, 0x3fd; test al, 0x20
        0x74, 0xf8,                         // jz: wait until the line is free
        0x88, 0xe0, 0xba, 0xf8, 0x03, 0xee, // mov al, ah; out 0x3f8, al
        0xc3,                               // ret
        16, 0, 1, 0, 0x00, 0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, // packet: 1 sector to 0x8000, from sector 1
        b' ', b'w', b'r', b'i', b't', b'e', b's', b'\n', // text
        b'l', b'o', b'g', b'i', b'n', b':', b' ', 0,
    ];
    let mut disk = vec![0; 1 << 20];
    disk[..CODE.len()].copy_from_slice(&CODE);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}
