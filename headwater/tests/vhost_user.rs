//! `headwater export --vhost-user` under a real guest: QEMU boots Debian from it, the disk keeps what is written, trimming
//! frees the write cache, a restart of the server is a pause for the guest and no error, and after a crash of the server the
//! guest is held until it is reset.
//!
//! One test, because booting is what costs. It takes minutes, and so is run by `make conformance`.

#[path = "it/support/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use headwater_qemu::{Acceleration, Disk, Exec, ExitReason, Guest, GuestSpec, Network, OnReboot};
use headwater_testkit::wait_until;
use support::{headwater, short_dir, signal};

/// Emulation on a busy host is slow; a boot takes ten seconds on an idle one.
const PATIENCE: Duration = Duration::from_secs(300);

/// The Debian guest, built unless it is there.
fn image() -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/build");
    let output = Command::new(&script).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.unwrap_or_else(|e| panic!("cannot run {}: {e}", script.display()));
    assert!(output.status.success(), "{} failed; its messages are above", script.display());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().last().expect("it prints the image's path").to_owned()
}

/// A running export, over both front-ends.
struct Export {
    child: Child,
    stats: PathBuf,
    log: PathBuf,
}

impl Export {
    fn start(dir: &Path, image: &str) -> Self {
        let stats = dir.join("stats.json");
        let log = dir.join("export.log");
        let log_file = std::fs::File::create(&log).expect("a log");
        let mut child = headwater()
            .arg("--data-dir")
            .arg(dir.join("data"))
            .args(["export", image, "--ram", "64M", "--disk", "4G", "--persistent", "lab", "--cache-dir"])
            .arg(dir.join("cache"))
            .arg("--vhost-user")
            .arg(dir.join("disk.sock"))
            .args(["--serial", "lab-1.disk"])
            .arg(format!("--nbd=unix:{}", dir.join("nbd.sock").display()))
            .arg("--stats")
            .arg(&stats)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file)
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut line = || lines.next().expect("a line for each front-end").expect("text");
        assert!(line().starts_with("nbd+unix:"));
        assert_eq!(line(), format!("vhost-user:{}", dir.join("disk.sock").display()));
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, stats, log }
    }

    /// The counters as they are now.
    fn counters(&self) -> serde_json::Value {
        std::fs::remove_file(&self.stats).expect("there were counters before");
        signal(self.child.id(), "USR1");
        wait_until("the counters are written", || self.stats.exists());
        serde_json::from_slice(&std::fs::read(&self.stats).expect("it can be read")).expect("JSON")
    }

    fn stop(mut self) {
        signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
        // A disk that is busy for seconds has the guest's writes wait, and the log say so.
        let log = self.log();
        let others: Vec<&str> = log.lines().filter(|line| !line.contains("writes wait for space")).collect();
        assert!(others.is_empty(), "{log}");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a log")
    }

    /// `kill -9`.
    fn crash(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Only after a failed test is it still there.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spec(dir: &Path) -> GuestSpec {
    GuestSpec {
        name: "lab-1".into(),
        uuid: uuid::Uuid::from_u128(0x0123_4567_89ab_cdef),
        mac: "52:54:00:00:00:08".parse().expect("an address"),
        memory_bytes: 512 << 20,
        host_memory_bytes: u64::MAX,
        cpus: 2,
        disk: Disk::vhost_user(dir.join("disk.sock")),
        scratch: None,
        seed: None,
        run_dir: dir.join("run"),
        firmware: headwater_qemu::Firmware::Bios,
        tpm: None,
        display: headwater_qemu::Display::None,
        network: Network::None,
        acceleration: Acceleration::Tcg { reason: "it is a test".into() },
        on_reboot: OnReboot::Continue,
    }
}

async fn sh(guest: &Guest, script: &str) -> String {
    let command = ["sh", "-c", script].map(str::to_owned).into();
    let exec = Exec { command, input: Vec::new(), timeout: PATIENCE };
    let output = guest.agent().exec(&exec).await.unwrap_or_else(|e| panic!("{script}: {e}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.exit_code, 0, "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text.trim().to_owned()
}

const WRITE: &str = "dd if=/dev/urandom of=/root/data bs=1M count=100 2>/dev/null; sync; \
                     md5sum /root/data >/root/sum; sync; echo 3 >/proc/sys/vm/drop_caches";

/// A writer and a reader on each processor, past the page cache: each has a queue of its own.
const ON_BOTH_QUEUES: &str = r#"cd /root; for cpu in 0 1; do taskset -c $cpu sh -c "head -c 16777216 /dev/urandom >in$cpu; \
     dd if=in$cpu of=out$cpu bs=4k oflag=direct" 2>/dev/null & done; wait; echo 3 >/proc/sys/vm/drop_caches; \
     for cpu in 0 1; do taskset -c $cpu cmp in$cpu out$cpu || echo differs; done; rm in? out?; \
     awk '/virtio.*-req/ { n = 0; for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) n += $i; if (n > 99) busy++ } \
     END { print busy + 0 }' /proc/interrupts"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_debian_guest_boots_from_it_trims_it_and_survives_a_restart_of_the_server() {
    let dir = short_dir();
    let dir = dir.path();
    std::fs::create_dir(dir.join("cache")).expect("a directory");
    let image = image();
    let export = Export::start(dir, &image);
    let guest = Guest::start(&spec(dir)).await.expect("it starts");
    guest.wait_booted(PATIENCE).await.expect("it boots");
    guest.agent().ping(PATIENCE).await.expect("its agent answers");
    assert_eq!(sh(&guest, "cat /sys/block/vda/serial; echo; ls /sys/block/vda/mq").await, "lab-1.disk\n0\n1");

    sh(&guest, WRITE).await;
    sh(&guest, "md5sum -c /root/sum").await;
    assert_eq!(sh(&guest, ON_BOTH_QUEUES).await, "2", "queues that had interrupts");
    sh(&guest, "rm /root/data; sync; fstrim /").await;
    let counters = export.counters();
    let discarded = counters["cache"]["discarded_blocks"].as_u64().expect("a number");
    assert!(discarded >= 100 << 8, "{discarded} blocks of the write cache were freed");

    // While the guest writes, the server ends and another one takes its place.
    sh(&guest, &format!("({WRITE}; touch /root/done) >/dev/null 2>&1 &")).await;
    let writes = || export.counters()["write_bytes"].as_u64();
    let before = writes();
    wait_until("the guest writes", || writes() > before);
    export.stop();
    let export = Export::start(dir, &image);
    let wait = "for i in $(seq 600); do test -e /root/done && break; sleep 0.5; done; cat /root/done";
    sh(&guest, wait).await;
    sh(&guest, "md5sum -c /root/sum").await;
    assert_eq!(sh(&guest, "dmesg | grep -i 'i/o error\\|ext4.*error' || echo none").await, "none");

    // The server crashes: answered writes may be lost, so that this guest must not go on, but boot again.
    sh(&guest, "sync").await;
    export.crash();
    let export = Export::start(dir, &image);
    wait_until("the guest is turned away", || {
        export.log().contains("did not end in order: restart the machine")
    });
    let mut state = guest.watch();
    guest.monitor().execute("system_reset", serde_json::json!({})).await.expect("it can be reset");
    let restarted = state.wait_for(|state| state.boot.is_none());
    tokio::time::timeout(PATIENCE, restarted).await.expect("it restarts").expect("it runs");
    guest.wait_booted(PATIENCE).await.expect("it boots again");
    guest.agent().ping(PATIENCE).await.expect("its agent answers");
    sh(&guest, "md5sum -c /root/sum").await;
    let exit = guest.stop(PATIENCE).await.expect("it stops");
    assert_eq!(exit.reason, ExitReason::Stopped, "{exit}");
    std::fs::write(&export.log, "").expect("the log can be cut off");
    export.stop();
    assert!(!dir.join("disk.sock").exists());
}
