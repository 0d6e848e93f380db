//! Tests machines under the real QEMU. Their operating system is a boot sector, so a boot takes a moment.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use headwater_qemu::{
    Acceleration, BootSign, Disk, Display, Error, ExitReason, Firmware, Guest, GuestSpec, Network, OnReboot,
    Phase, Version, kill_machines, sweep_orphans,
};
use uuid::Uuid;

/// Emulation on a busy host is slow; a boot sector takes a second on an idle one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Prints "login:" on the serial line and waits for ever.
#[rustfmt::skip]
pub(crate) const LOGIN: &[u8] = &[
    0x31, 0xdb,                   // xor bx, bx
    0xba, 0xf8, 0x03,             // mov dx, 0x3f8
    0x2e, 0x8a, 0x87, 0x16, 0x7c, // next: mov al, cs:[bx + text]
    0x84, 0xc0,                   // test al, al
    0x74, 0x04,                   // jz wait
    0xee,                         // out dx, al
    0x43,                         // inc bx
    0xeb, 0xf4,                   // jmp next
    0xfb, 0xf4,                   // wait: sti; hlt
    0xeb, 0xfc,                   // jmp wait
    b'l', b'o', b'g', b'i', b'n', b':', 0,
];

/// Switches the machine off: "soft off" to the power management port of the q35 board.
#[rustfmt::skip]
const POWER_OFF: &[u8] = &[
    0xba, 0x04, 0x06, // mov dx, 0x604
    0xb8, 0x00, 0x20, // mov ax, 0x2000
    0xef,             // out dx, ax
    0xf4, 0xeb, 0xfd, // hlt; jmp back
];

/// Restarts the machine through the reset port.
#[rustfmt::skip]
const RESTART: &[u8] = &[
    0xba, 0xf9, 0x0c, // mov dx, 0xcf9
    0xb0, 0x06,       // mov al, 6
    0xee,             // out dx, al
    0xf4, 0xeb, 0xfd, // hlt; jmp back
];

/// A disk with a boot sector, served by qemu-nbd until dropped.
pub(crate) struct Setup {
    pub(crate) dir: tempfile::TempDir,
    server: Child,
}

impl Setup {
    pub(crate) fn new(code: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.raw");
        let mut bytes = code.to_vec();
        bytes.resize(510, 0);
        bytes.extend_from_slice(&[0x55, 0xaa]);
        bytes.resize(1 << 20, 0);
        std::fs::write(&disk, bytes).unwrap();
        let socket = dir.path().join("nbd.sock");
        let server = Command::new("qemu-nbd")
            .args(["--persistent", "--format=raw", "--shared=0", "--export-name=disk"])
            .arg(format!("--socket={}", socket.display()))
            .arg(&disk)
            .stdin(Stdio::null())
            .spawn()
            .expect("cannot run qemu-nbd; apt-get install qemu-utils");
        Self { dir, server: when_listening(server, &socket) }
    }

    pub(crate) fn spec(&self, name: &str) -> GuestSpec {
        GuestSpec {
            name: name.into(),
            uuid: Uuid::from_u128(7),
            mac: "52:54:00:00:00:07".parse().unwrap(),
            memory_bytes: 64 << 20,
            host_memory_bytes: u64::MAX,
            cpus: 1,
            disk: Disk::nbd(self.dir.path().join("nbd.sock"), "disk"),
            scratch: None,
            seed: None,
            run_dir: self.run_root().join(name),
            firmware: Firmware::Bios,
            tpm: None,
            display: Display::None,
            network: Network::None,
            acceleration: Acceleration::Tcg { reason: "it is a test".into() },
            on_reboot: OnReboot::Continue,
        }
    }

    pub(crate) fn run_root(&self) -> PathBuf {
        self.dir.path().join("run")
    }
}

/// Waits until a child has opened its socket.
pub(crate) fn when_listening(mut child: Child, socket: &Path) -> Child {
    for _ in 0..600 {
        if socket.exists() {
            return child;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    panic!("a child does not open {}", socket.display());
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Whether the only mapping of a process with exactly this many bytes is excluded from core dumps.
fn stays_out_of_core_dumps(pid: u32, bytes: u64) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut lines = maps.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let size = (bytes >> 10).to_string();
    assert!(lines.any(|line| line.first() == Some(&"Size:") && line.get(1) == Some(&size.as_str())));
    lines.find(|line| line.first() == Some(&"VmFlags:")).unwrap().contains(&"dd")
}

pub(crate) fn kill_9(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn acceleration_is_decided_by_running_a_guest() {
    let first = headwater_qemu::probe_acceleration().await.unwrap();
    if let Acceleration::Tcg { reason } = &first {
        assert!(reason.contains("/dev/kvm"), "{reason}");
    }
    assert_eq!(first, headwater_qemu::probe_acceleration().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_boots_reports_its_state_and_stops() {
    let setup = Setup::new(LOGIN);
    let guest = Guest::start(&setup.spec("one")).await.unwrap();
    let boot = guest.wait_booted(PATIENCE).await.unwrap();
    assert_eq!(boot.sign, BootSign::LoginPrompt);
    assert_eq!(guest.state().phase, Phase::Up);
    let status = guest.status().await.unwrap();
    assert!(status.running && status.status == "running", "{status:?}");
    let refused = guest.monitor().execute("no-such-command", serde_json::json!({})).await.unwrap_err();
    assert!(matches!(&refused, Error::Monitor { class, .. } if class == "CommandNotFound"), "{refused}");
    let silent = guest.agent().ping(Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(silent, Error::Timeout { .. }), "{silent}");
    tokio::net::UnixStream::connect(guest.files().console_socket()).await.unwrap();
    assert!(stays_out_of_core_dumps(guest.pid(), 64 << 20));

    // A boot sector does not know what a power button is.
    let exit = guest.stop(Duration::from_millis(300)).await.unwrap();
    assert_eq!(exit.reason, ExitReason::Killed);
    assert_eq!(guest.state().phase, Phase::Exited);
    assert!(!is_alive(guest.pid()));
    assert_eq!(names(&guest.files().dir), ["console.log", "qemu.log"]);
    assert!(matches!(guest.status().await, Err(Error::Gone(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_may_switch_itself_off_or_restart() {
    let setup = Setup::new(POWER_OFF);
    let guest = Guest::start(&setup.spec("off")).await.unwrap();
    let exit = tokio::time::timeout(PATIENCE, guest.wait_exit()).await.unwrap().unwrap();
    assert_eq!(exit.reason, ExitReason::PoweredOff, "{exit}");
    let error = guest.wait_booted(PATIENCE).await.unwrap_err();
    assert!(matches!(error, Error::Gone(_)), "{error}");

    let setup = Setup::new(RESTART);
    let mut spec = setup.spec("again");
    spec.on_reboot = OnReboot::Exit;
    let guest = Guest::start(&spec).await.unwrap();
    let exit = tokio::time::timeout(PATIENCE, guest.wait_exit()).await.unwrap().unwrap();
    assert_eq!(exit.reason, ExitReason::Rebooted, "{exit}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_qemu_is_noticed() {
    let setup = Setup::new(LOGIN);
    let guest = Guest::start(&setup.spec("crash")).await.unwrap();
    kill_9(guest.pid());
    let exit = tokio::time::timeout(PATIENCE, guest.wait_exit()).await.unwrap().unwrap();
    assert_eq!(exit.reason, ExitReason::Crashed);
    assert!(exit.status.contains("signal: 9"), "{exit}");
    assert!(!guest.files().pid_file().exists());
}

/// The kernel regards the thread that launched a process as its parent.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_outlives_the_thread_that_asked_for_it() {
    let setup = Setup::new(LOGIN);
    let spec = setup.spec("thread");
    let runtime = tokio::runtime::Handle::current();
    let start = std::thread::spawn(move || runtime.block_on(Guest::start(&spec)));
    let guest = tokio::task::spawn_blocking(|| start.join().unwrap()).await.unwrap().unwrap();
    guest.wait_booted(PATIENCE).await.unwrap();
    assert!(guest.status().await.unwrap().running);
    guest.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_says_why_and_leaves_nothing_running() {
    let setup = Setup::new(LOGIN);
    let mut spec = setup.spec("no-disk");
    spec.disk = Disk::nbd(spec.disk.socket.clone(), "other");
    let error = Guest::start(&spec).await.unwrap_err();
    assert!(matches!(error, Error::StartFailed { .. }), "{error}");
    assert!(error.to_string().contains("other"), "{error}");
    assert_eq!(names(&spec.run_dir), ["console.log", "qemu.log"]);
    (spec.memory_bytes, spec.host_memory_bytes) = (1 << 50, 1 << 40);
    let error = Guest::start(&spec).await.unwrap_err();
    assert!(matches!(error, Error::Spec { .. }), "{error}");
}

/// Starts QEMU like a daemon that is killed right afterwards: no process watches QEMU.
fn abandon(spec: &GuestSpec) -> Child {
    std::fs::create_dir_all(&spec.run_dir).unwrap();
    // The version matters for disks over vhost-user only.
    let arguments = spec.arguments(false, Version(7, 2));
    let child = Command::new("qemu-system-x86_64").args(arguments).spawn().unwrap();
    when_listening(child, &spec.files().monitor_socket())
}

/// The line in the pid file of a process: its number, and when it was started.
fn pid_line(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start_ticks: u64 = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap();
    format!("{pid} {start_ticks}\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn only_orphans_are_ended() {
    let setup = Setup::new(LOGIN);
    let other = Setup::new(LOGIN);
    let specs = ["with-file", "without-file", "reused-number"].map(|name| setup.spec(name));
    let mut orphans = specs.each_ref().map(abandon);
    let stranger = other.spec("stranger");
    let mut bystander = abandon(&stranger);
    std::fs::write(specs[0].files().pid_file(), pid_line(orphans[0].id())).unwrap();
    // This pid file names a living process that is not this machine's.
    std::fs::write(specs[2].files().pid_file(), pid_line(bystander.id())).unwrap();

    let mut swept = sweep_orphans(&setup.run_root(), &[]).await.unwrap();
    swept.sort_by_key(|orphan| orphan.run_dir.clone());
    let found: Vec<(PathBuf, u32, bool)> = swept.into_iter().map(|o| (o.run_dir, o.pid, o.ended)).collect();
    let mut want: Vec<_> =
        specs.iter().zip(&orphans).map(|(spec, child)| (spec.run_dir.clone(), child.id(), true)).collect();
    want.sort();
    assert_eq!(found, want);
    for orphan in &mut orphans {
        orphan.wait().unwrap();
    }
    assert!(bystander.try_wait().unwrap().is_none(), "an unrelated process was ended");
    assert!(!specs[0].files().pid_file().exists() && !specs[0].files().monitor_socket().exists());
    assert!(sweep_orphans(&setup.run_root(), &[]).await.unwrap().is_empty());
    assert!(sweep_orphans(&setup.dir.path().join("missing"), &[]).await.unwrap().is_empty());
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_are_killed_and_their_files_stay() {
    let setup = Setup::new(LOGIN);
    let specs = ["with-file", "without-file", "not-named"].map(|name| setup.spec(name));
    let mut machines = specs.each_ref().map(abandon);
    std::fs::write(specs[0].files().pid_file(), pid_line(machines[0].id())).unwrap();
    // A stopped QEMU does not react to SIGTERM.
    let stopped = Command::new("kill").args(["-STOP", &machines[0].id().to_string()]).status().unwrap();
    assert!(stopped.success());

    let named = ["with-file", "without-file", "missing"].map(str::to_owned);
    let mut killed = kill_machines(&setup.run_root(), &named).await;
    killed.sort_by_key(|orphan| orphan.run_dir.clone());
    let found: Vec<(PathBuf, u32, bool)> = killed.into_iter().map(|o| (o.run_dir, o.pid, o.ended)).collect();
    let of = |machine: usize| (specs[machine].run_dir.clone(), machines[machine].id(), true);
    assert_eq!(found, [of(0), of(1)]);
    for machine in &mut machines[..2] {
        machine.wait().unwrap();
    }
    assert!(machines[2].try_wait().unwrap().is_none(), "a machine was ended that was not named");
    // Removing them would need a disk that answers.
    assert!(specs[0].files().pid_file().exists() && specs[1].files().monitor_socket().exists());
    assert!(kill_machines(&setup.run_root(), &named).await.is_empty());
    machines[2].kill().unwrap();
    machines[2].wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_with_another_directory_at_the_path_is_spared() {
    let setup = Setup::new(LOGIN);
    let mut spec = setup.spec("same");
    let (elsewhere, link) = (setup.dir.path().join("elsewhere"), setup.dir.path().join("link"));
    std::fs::create_dir_all(&spec.run_dir).unwrap();
    std::fs::create_dir(&elsewhere).unwrap();
    // A symbolic link to the whole path must be followed.
    std::os::unix::fs::symlink(setup.run_root(), &link).unwrap();
    let real = std::mem::replace(&mut spec.run_dir, link.join("same"));
    // As in a container: with a mount namespace of its own, even if the test does not run as root.
    let user: &[&str] =
        if std::fs::metadata("/proc/self").unwrap().uid() == 0 { &[] } else { &["--map-root-user"] };
    let child = Command::new("unshare")
        .args(user)
        .args([
            "--mount",
            "sh",
            "-c",
            "mount --bind \"$1\" \"$2\" && shift 2 && exec qemu-system-x86_64 \"$@\"",
            "sh",
        ])
        .args([&elsewhere, &real])
        .args(spec.arguments(false, Version(7, 2)))
        .spawn()
        .unwrap();
    let monitor = spec.files().monitor_socket();
    let mut theirs = when_listening(child, &elsewhere.join(monitor.file_name().unwrap()));
    assert!(sweep_orphans(&link, &[]).await.unwrap().is_empty());
    assert!(theirs.try_wait().unwrap().is_none(), "another daemon's machine was ended");
    theirs.kill().unwrap();
    theirs.wait().unwrap();
}
