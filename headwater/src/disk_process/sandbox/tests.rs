//! A process that restricts itself, and tries what it may and may not do.
#![expect(unsafe_code, reason = "system calls that no library offers are tried by number")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::*;

/// The directory in which the child tries its actions. Only the child has this variable.
const PLACE: &str = "HEADWATER_SANDBOX_TEST";

/// The port of a server that the child tries to reach.
const PORT: &str = "HEADWATER_SANDBOX_PORT";

fn needs(place: &Path, network: bool) -> Needs {
    let data = place.join("data");
    Needs {
        read: vec![data.join("store")],
        replaced: vec![place.join("token/current"), data.join("ca")],
        write: vec![data.join("cache"), data.join("keys")],
        listen: vec![data.join("run")],
        guarded: data,
        network,
    }
}

/// "yes", "no" if it is not permitted, or what else happened.
fn word<T>(outcome: std::io::Result<T>) -> String {
    match outcome {
        Ok(_) => "yes".to_owned(),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => "no".to_owned(),
        Err(e) => format!("failed: {e}"),
    }
}

fn call(number: libc::c_long) -> std::io::Result<()> {
    // SAFETY: without arguments, each of these fails or changes nothing that a test relies on.
    match unsafe { libc::syscall(number, 0, 0, 0, 0, 0, 0) } {
        0.. => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn tries(place: &Path) -> Vec<(&'static str, String)> {
    let data = place.join("data");
    let at = |path: &str| data.join(path);
    let port: u16 = std::env::var(PORT).unwrap().parse().unwrap();
    let cache = || {
        fs::create_dir(at("cache/disk"))?;
        fs::write(at("cache/disk/new"), "x")?;
        fs::rename(at("cache/disk/new"), at("cache/map"))?;
        File::options().write(true).truncate(true).open(at("cache/map"))?;
        fs::remove_dir(at("cache/disk"))?;
        fs::remove_file(at("cache/map"))
    };
    let parent = rustix::process::getppid().unwrap();
    vec![
        ("read the store", word(fs::read(at("store/object")))),
        ("list the store", word(fs::read_dir(at("store")))),
        ("write the store", word(File::options().write(true).open(at("store/object")))),
        ("add to the store", word(File::create(at("store/new")))),
        ("remove from the store", word(fs::remove_file(at("store/object")))),
        ("use the cache", word(cache())),
        ("make a key", word(fs::write(at("keys/disk"), "x"))),
        ("listen for a machine", word(UnixListener::bind(at("run/lab/disk.sock")))),
        ("write among machines", word(File::create(at("run/lab/qemu.log")))),
        ("listen elsewhere", word(UnixListener::bind(at("other.sock")))),
        ("read the token of the API", word(fs::read(at("api.token")))),
        ("read a replaced token", {
            fs::rename(place.join("token/next"), place.join("token/current")).unwrap_err();
            word(fs::read(place.join("token/current")))
        }),
        ("read the authority in the data directory", word(fs::read(at("ca")))),
        ("read elsewhere", word(fs::read(place.join("secret")))),
        ("write elsewhere", word(File::create(place.join("new")))),
        ("read the settings of the host", word(fs::read("/etc/passwd"))),
        ("read memory limits", word(fs::read("/proc/meminfo"))),
        ("call the daemon", word(UnixStream::connect(at("api.sock")))),
        ("connect by TCP", word(TcpStream::connect(("127.0.0.1", port)))),
        ("listen by TCP", word(TcpListener::bind("127.0.0.1:0"))),
        ("use UDP", word(UdpSocket::bind("127.0.0.1:0"))),
        ("signal its parent", word(rustix::process::test_kill_process(parent).map_err(Into::into))),
        ("start a program", word(Command::new("/bin/true").status())),
        ("become a program", word(Err::<(), _>(Command::new("/bin/true").exec()))),
        ("start a thread", word(std::thread::Builder::new().spawn(|| {}))),
        ("use io_uring", word(io_uring::IoUring::new(4))),
        ("trace", word(call(libc::SYS_ptrace))),
        ("leave its namespaces", word(call(libc::SYS_unshare))),
        ("read others' memory", word(call(libc::SYS_process_vm_readv))),
        ("load a program into the kernel", word(call(libc::SYS_bpf))),
        ("watch page faults", word(call(libc::SYS_userfaultfd))),
        ("mount", word(call(libc::SYS_mount))),
        (
            "use x32",
            call(0x4000_0000 | libc::SYS_getpid).map_or_else(|e| e.to_string(), |()| "yes".to_owned()),
        ),
        ("keep capabilities", {
            let left = caps::read(None, CapSet::Permitted).unwrap();
            if left.iter().all(|left| KEPT.contains(left)) { "no" } else { "yes" }.to_owned()
        }),
    ]
}

/// The child that the other tests start. Run by itself, it checks nothing.
#[test]
fn child() {
    let Some(place) = std::env::var_os(PLACE) else { return };
    let place = Path::new(&place);
    let sandbox = needs(place, std::env::args().any(|word| word == "network")).restrict().unwrap();
    assert_eq!((&sandbox.files, &sandbox.unfiltered), (&RulesetStatus::FullyEnforced, &None));
    for (what, outcome) in tries(place) {
        println!("\n{what}: {outcome}");
    }
}

/// The outcome of each action that a child tried.
fn may(network: bool) -> BTreeMap<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::create_dir_all(data.join("store")).unwrap();
    fs::create_dir_all(data.join("run/lab")).unwrap();
    fs::create_dir(dir.path().join("token")).unwrap();
    for file in ["data/store/object", "data/api.token", "data/ca", "token/current", "token/next", "secret"] {
        fs::write(dir.path().join(file), "x").unwrap();
    }
    let _daemon = UnixListener::bind(data.join("api.sock")).unwrap();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "disk_process::sandbox::tests::child", "--nocapture", "--test-threads=1"]);
    command.env(PLACE, dir.path()).env(PORT, server.local_addr().unwrap().port().to_string());
    if network {
        command.args(["--skip", "network"]);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let lines = text.lines().filter_map(|line| line.split_once(": "));
    lines.map(|(what, outcome)| (what.to_owned(), outcome.to_owned())).collect()
}

const ALWAYS: [(&str, &str); 26] = [
    ("read the store", "yes"),
    ("list the store", "yes"),
    ("use the cache", "yes"),
    ("make a key", "yes"),
    ("listen for a machine", "yes"),
    ("read memory limits", "yes"),
    ("read a replaced token", "yes"),
    ("read the authority in the data directory", "yes"),
    ("start a thread", "yes"),
    ("use io_uring", "yes"),
    ("write the store", "no"),
    ("add to the store", "no"),
    ("remove from the store", "no"),
    ("write among machines", "no"),
    ("listen elsewhere", "no"),
    ("read the token of the API", "no"),
    ("read elsewhere", "no"),
    ("write elsewhere", "no"),
    ("listen by TCP", "no"),
    ("signal its parent", "no"),
    ("start a program", "no"),
    ("become a program", "no"),
    ("trace", "no"),
    ("leave its namespaces", "no"),
    ("mount", "no"),
    ("keep capabilities", "no"),
];

fn check(may: &BTreeMap<String, String>, expected: impl IntoIterator<Item = (&'static str, &'static str)>) {
    for (what, outcome) in expected {
        assert_eq!(may.get(what).map(String::as_str), Some(outcome), "{what}: {may:#?}");
    }
}

#[test]
fn a_process_over_a_directory_reaches_its_files_and_no_network() {
    let may = may(false);
    check(&may, ALWAYS);
    let more = ["read others' memory", "load a program into the kernel", "watch page faults"];
    let local = ["read the settings of the host", "call the daemon", "connect by TCP", "use UDP"];
    check(&may, more.into_iter().chain(local).map(|what| (what, "no")));
    if cfg!(target_arch = "x86_64") {
        check(&may, [("use x32", "Function not implemented (os error 38)")]);
    }
}

#[test]
fn a_process_over_a_store_across_a_network_reaches_servers_too() {
    let may = may(true);
    check(&may, ALWAYS);
    check(&may, [("connect by TCP", "yes"), ("read the settings of the host", "yes")]);
}

#[test]
fn a_directory_that_appears_or_is_replaced_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, cache) = (dir.path().join("store"), dir.path().join("cache"));
    fs::create_dir(&cache).unwrap();
    let roots = [&store, &cache].map(|path| (path.clone(), identity(path))).into();
    let sandbox = Sandbox { files: RulesetStatus::FullyEnforced, unfiltered: None, roots };
    assert!(!sandbox.has_moved());
    fs::create_dir(&store).unwrap();
    assert!(sandbox.has_moved());
    fs::remove_dir(&store).unwrap();
    assert!(!sandbox.has_moved(), "what is still missing needs no other process");
    // Kept under another name, so that the next one has another number.
    fs::rename(&cache, dir.path().join("old")).unwrap();
    fs::create_dir(&cache).unwrap();
    assert!(sandbox.has_moved());
}
