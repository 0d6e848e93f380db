//! Domains of libvirt whose disks `headwater export` serves: the XML that `headwater libvirt domain` prints is valid and
//! boots; a disk over vhost-user is empty again after a restart of the export, and a disk over NBD is kept; the export is
//! killed, and the guest is held until a reset, or paused and continues.
//!
//! libvirtd runs as root in namespaces of its own, with private directories: it sees neither domains nor settings of
//! this host. It needs root and the packages libvirt-daemon-system and libvirt-clients, and so is run by
//! `make conformance`.

#[path = "it/support/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use headwater_testkit::wait_until;
use support::{Ran, headwater, run, short_dir, signal, tiny_disk};

/// Starts libvirtd with directories of its own. It is called with the directory of the test.
const LIBVIRTD: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir /run/libvirt
for dir in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do mount -t tmpfs tmpfs "$dir"; done
cat >/etc/libvirt/qemu.conf <<END
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
END
cat >"$1/libvirtd.conf" <<END
unix_sock_dir = "$1"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "2:file:$1/libvirtd.log"
END
libvirtd --config "$1/libvirtd.conf" --pid-file "$1/libvirtd.pid" &
wait
"#;

/// A libvirtd without access to the host's domains.
struct Libvirt {
    dir: tempfile::TempDir,
    child: Child,
}

impl Libvirt {
    fn start() -> Self {
        let dir = short_dir();
        // Its end ends everything in the namespace: libvirtd and the machines.
        let child = Command::new("unshare")
            .args([
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                LIBVIRTD,
                "sh",
            ])
            .arg(dir.path())
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare starts");
        let libvirt = Self { dir, child };
        wait_until("libvirtd answers", || libvirt.virsh(&["version"]).code == 0);
        libvirt
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn virsh(&self, args: &[&str]) -> Ran {
        let uri = format!("qemu:///system?socket={}", self.path("libvirt-sock").display());
        run(Command::new("virsh").env("LC_ALL", "C").args(["--quiet", "--connect", &uri]).args(args))
    }

    /// Virsh must fail with a message that has these words.
    fn refuses(&self, args: &[&str], words: &str) {
        let ran = self.virsh(args);
        assert!(ran.code != 0 && ran.err.contains(words), "{args:?} without {words:?}: {ran:?}");
    }

    /// Defines a domain with the disk of an address. Its console is a socket, and its output a file.
    fn define(&self, name: &str, address: &str) {
        let xml =
            run(headwater().args(["libvirt", "domain", name, address, "--memory", "64M", "--emulated"])).ok();
        let file = self.path("domain.xml");
        let text = file.to_str().expect("UTF-8");
        std::fs::write(&file, &xml).expect("it can be written");
        run(Command::new("virt-xml-validate").args([text, "domain"])).ok();
        let serial = format!(
            "<serial type='unix'><source mode='bind' path='{}'/><log file='{}' append='off'/></serial>",
            self.path("console.sock").display(),
            self.path("console.log").display()
        );
        assert!(xml.contains("<console type='pty'/>"), "{xml}");
        std::fs::write(&file, xml.replace("<console type='pty'/>", &serial)).expect("it can be written");
        self.virsh(&["define", text, "--validate"]).ok();
    }

    fn start_domain(&self, name: &str) {
        self.virsh(&["start", name]).ok();
    }

    fn state(&self, name: &str) -> String {
        self.virsh(&["domstate", name, "--reason"]).ok().trim().to_owned()
    }

    /// The output of the guest since its start.
    fn printed(&self) -> String {
        let bytes = std::fs::read(self.path("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the guest has booted `boots` times since its start, the last time after `writes` writes.
    fn wait_for_boot(&self, boots: usize, writes: usize) {
        wait_until(format!("boot {boots}"), || self.printed().matches("login: ").count() == boots);
        let printed = self.printed();
        let last = printed.rsplit_once(" writes").expect("the guest says so").0;
        assert!(last.ends_with(&writes.to_string()), "{writes} writes: {printed:?}");
    }

    /// Tells the guest to write to its disk. The key may be lost if the console is closed before the guest has read it.
    fn tell_to_write(&self) -> UnixStream {
        let mut console = UnixStream::connect(self.path("console.sock")).expect("QEMU listens");
        console.write_all(b"w").expect("it reads");
        console
    }

    /// How often the guest has said that it has written.
    fn count_writes(&self) -> usize {
        self.printed().matches('W').count()
    }

    /// Has the guest write to its disk, and waits for that.
    fn write(&self) {
        let before = self.count_writes();
        let _console = self.tell_to_write();
        wait_until("the guest has written", || self.count_writes() > before);
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.path("libvirtd.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(30)..];
            let _ = std::io::stderr().write_all(format!("libvirtd:\n{}\n", last.join("\n")).as_bytes());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running export of the tiny disk.
struct Export {
    child: Child,
    address: String,
    log: PathBuf,
}

impl Export {
    fn start(dir: &Path, args: &[&str]) -> Self {
        let disk = dir.join("tiny.raw");
        if !disk.exists() {
            std::fs::write(&disk, tiny_disk()).expect("it can be written");
        }
        let log = dir.join("export.log");
        let log_file = std::fs::File::create(&log).expect("a log");
        let mut child = headwater()
            .arg("--data-dir")
            .arg(dir.join("data"))
            .arg("export")
            .arg(&disk)
            .args(["--format", "raw"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file)
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let address = lines.next().expect("a line").expect("text");
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, log }
    }

    fn stop(mut self) {
        signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
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

#[test]
fn a_restarted_export_has_an_empty_vhost_user_disk() {
    let libvirt = Libvirt::start();
    let socket = libvirt.path("disk.sock");
    let args = ["--cache", "ram", "--ram", "64M", "--vhost-user", socket.to_str().expect("UTF-8")];
    let export = Export::start(libvirt.dir.path(), &args);
    libvirt.define("desk-1", &export.address);
    libvirt.start_domain("desk-1");
    libvirt.wait_for_boot(1, 0);
    libvirt.write();

    // The same export has the same disk, also for the next QEMU.
    libvirt.virsh(&["destroy", "desk-1"]).ok();
    libvirt.start_domain("desk-1");
    libvirt.wait_for_boot(1, 1);
    libvirt.virsh(&["destroy", "desk-1"]).ok();
    export.stop();
    let export = Export::start(libvirt.dir.path(), &args);
    libvirt.start_domain("desk-1");
    libvirt.wait_for_boot(1, 0);

    let file = libvirt.path("saved");
    libvirt.refuses(&["save", "desk-1", file.to_str().expect("UTF-8")], "VHOST_USER_PROTOCOL_F_LOG_SHMFD");
    libvirt.refuses(&["managedsave", "desk-1"], "VHOST_USER_PROTOCOL_F_LOG_SHMFD");
    libvirt.refuses(&["snapshot-create-as", "desk-1", "now"], "unsupported configuration");
    libvirt.refuses(&["domblkstat", "desk-1", "vda"], "vhostuser");

    // The guest knows of writes that are lost, so it is held until it boots again.
    libvirt.write();
    export.crash();
    let export = Export::start(libvirt.dir.path(), &args);
    wait_until("the machine is refused", || {
        std::fs::read_to_string(&export.log).expect("a log").contains("restart the machine")
    });
    let console = libvirt.tell_to_write();
    assert_eq!(libvirt.state("desk-1"), "running (booted)");
    drop(console);
    libvirt.virsh(&["reset", "desk-1"]).ok();
    libvirt.wait_for_boot(2, 0);
    libvirt.write();
    libvirt.virsh(&["destroy", "desk-1"]).ok();
    export.stop();
}

#[test]
fn a_guest_with_a_kept_disk_survives_a_crash() {
    let libvirt = Libvirt::start();
    let path = |name: &str| libvirt.path(name).to_str().expect("UTF-8").to_owned();
    let (nbd, cache, key, saved) =
        (format!("unix:{}", path("nbd.sock")), path("cache"), path("key"), path("saved"));
    std::fs::create_dir(&cache).expect("it can be made");
    let args = [
        "--cache",
        "ram+disk",
        "--ram",
        "64M",
        "--disk",
        "1G",
        "--persistent",
        "desk-2",
        "--cache-dir",
        &cache,
        "--key-file",
        &key,
        "--nbd",
        &nbd,
    ];
    let export = Export::start(libvirt.dir.path(), &args);
    libvirt.define("desk-2", &export.address);
    libvirt.start_domain("desk-2");
    libvirt.wait_for_boot(1, 0);
    libvirt.write();

    // Answered writes are durable, and QEMU repeats the write that failed.
    export.crash();
    let before = libvirt.count_writes();
    let console = libvirt.tell_to_write();
    wait_until("the domain is paused", || libvirt.state("desk-2") == "paused (I/O error)");
    let export = Export::start(libvirt.dir.path(), &args);
    // QEMU connects again beside its requests, so the first one after a resume may fail once more.
    wait_until("the guest has written", || {
        if libvirt.state("desk-2") == "paused (I/O error)" {
            libvirt.virsh(&["resume", "desk-2"]).ok();
        }
        libvirt.count_writes() > before
    });
    drop(console);
    libvirt.write();
    assert_eq!(libvirt.state("desk-2"), "running (unpaused)");
    libvirt.virsh(&["destroy", "desk-2"]).ok();
    export.stop();
    let export = Export::start(libvirt.dir.path(), &args);
    libvirt.start_domain("desk-2");
    libvirt.wait_for_boot(1, 3);

    libvirt.virsh(&["domblkstat", "desk-2", "vda"]).ok();
    libvirt.virsh(&["save", "desk-2", &saved]).ok();
    export.stop();
    let export = Export::start(libvirt.dir.path(), &args);
    libvirt.virsh(&["restore", &saved]).ok();
    libvirt.write();
    libvirt.virsh(&["reset", "desk-2"]).ok();
    wait_until("it boots", || libvirt.printed().contains("4 writes\nlogin: "));
    libvirt.virsh(&["destroy", "desk-2"]).ok();
    export.stop();
}
