//! Tests with a real Debian guest: boot, identity, commands through the agent, power button, restart.
//!
//! It is built by `guest/build`, which `make long` runs before it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use headwater_qemu::{
    Acceleration, Disk, Exec, ExecOutput, ExitReason, Guest, GuestSpec, Identity, Network, OnReboot, Phase,
    SshHostKey, seed,
};
use uuid::Uuid;

const UUID: Uuid = Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
/// Emulation on a busy host is slow; a boot takes ten seconds on an idle one.
const PATIENCE: Duration = Duration::from_secs(300);

fn image() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let image = root.join("build/guest/guest.qcow2");
    assert!(image.exists(), "{} is missing; run guest/build", image.display());
    image
}

/// Serves the image; writes are discarded when the server ends.
struct Server(Child);

impl Server {
    fn start(socket: &Path) -> Self {
        let child = Command::new("qemu-nbd")
            .args(["--persistent", "--snapshot", "--format=qcow2", "--export-name=disk", "--discard=unmap"])
            .arg(format!("--socket={}", socket.display()))
            .arg(image())
            .stdin(Stdio::null())
            .spawn()
            .expect("cannot run qemu-nbd; apt-get install qemu-utils");
        let server = Self(child);
        for _ in 0..600 {
            if socket.exists() {
                return server;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("qemu-nbd does not open its socket");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn identity() -> Identity {
    let mut identity = Identity::new("lab-1", UUID);
    identity.user_data = Some(b"#!/bin/sh\necho \"it is $(hostname)\" >/root/user-data-ran\n".to_vec());
    let (private, public) = ("private\n".to_owned(), "ssh-ed25519 public\n".to_owned());
    identity.ssh_host_keys.push(SshHostKey { kind: "ed25519".into(), private, public });
    identity.personality.insert("room".to_owned(), "7 north".to_owned());
    identity
}

fn spec(dir: &Path) -> GuestSpec {
    GuestSpec {
        name: "lab-1".into(),
        uuid: UUID,
        mac: "52:54:00:00:00:07".parse().unwrap(),
        memory_bytes: 512 << 20,
        host_memory_bytes: u64::MAX,
        cpus: 1,
        disk: Disk::nbd(dir.join("nbd.sock"), "disk"),
        scratch: None,
        seed: Some(dir.join("seed.img")),
        run_dir: dir.join("run"),
        firmware: headwater_qemu::Firmware::Bios,
        tpm: None,
        display: headwater_qemu::Display::None,
        network: Network::User,
        acceleration: Acceleration::Tcg { reason: "it is a test".into() },
        on_reboot: OnReboot::Continue,
    }
}

async fn run(
    guest: &Guest,
    command: &[&str],
    input: &str,
    timeout: Duration,
) -> headwater_qemu::Result<ExecOutput> {
    let command = command.iter().map(|&word| word.to_owned()).collect();
    guest.agent().exec(&Exec { command, input: input.as_bytes().to_vec(), timeout }).await
}

async fn sh(guest: &Guest, script: &str) -> String {
    let output = run(guest, &["sh", "-c", script], "", PATIENCE).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.exit_code, 0, "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_debian_guest_has_its_identity_runs_commands_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let _server = Server::start(&dir.path().join("nbd.sock"));
    let spec = spec(dir.path());
    seed::write(&dir.path().join("seed.img"), &identity(), &spec.network, spec.mac).unwrap();
    let guest = Guest::start(&spec).await.unwrap();
    let boot = guest.wait_booted(PATIENCE).await.unwrap();
    println!("booted in {:.1} s ({:?})", boot.seconds, boot.sign);
    guest.agent().ping(PATIENCE).await.unwrap();

    assert_eq!(sh(&guest, "hostname").await, "lab-1");
    assert_eq!(sh(&guest, "cat /etc/machine-id").await, UUID.simple().to_string());
    assert_eq!(sh(&guest, "cat /sys/class/dmi/id/product_uuid").await, UUID.to_string());
    assert_eq!(sh(&guest, "cat /etc/ssh/ssh_host_ed25519_key; ls /etc/ssh/ssh_host_*").await, {
        "private\n/etc/ssh/ssh_host_ed25519_key\n/etc/ssh/ssh_host_ed25519_key.pub"
    });
    let waited = "for i in $(seq 600); do test -e /root/user-data-ran && break; sleep 1; done; cat /root/user-data-ran";
    assert_eq!(sh(&guest, waited).await, "it is lab-1");
    assert_eq!(sh(&guest, "cat /sys/class/net/en*/address").await, "52:54:00:00:00:07");
    let personality = "mount -o ro LABEL=CIDATA /mnt && cat /mnt/personality && umount /mnt";
    assert_eq!(sh(&guest, personality).await, "room=7 north");
    // The guest can give disk space back (discard).
    assert_ne!(sh(&guest, "cat /sys/block/vda/queue/discard_max_bytes").await, "0");

    commands(&guest).await;
    grace_periods(&guest).await;

    sh(&guest, "touch /root/here; sync; (sleep 1; systemctl reboot) >/dev/null 2>&1 &").await;
    let mut state = guest.watch();
    let restarted = state.wait_for(|state| state.boot.is_none());
    tokio::time::timeout(PATIENCE, restarted).await.unwrap().unwrap();
    guest.wait_booted(PATIENCE).await.unwrap();
    assert_eq!(guest.state().phase, Phase::Up);
    guest.agent().ping(PATIENCE).await.unwrap();
    assert_eq!(sh(&guest, "ls /root/here").await, "/root/here");

    // While a guest comes up, no program in it handles the first press of the power button.
    sh(&guest, "systemctl stop systemd-logind; (sleep 5; systemctl start systemd-logind) >/dev/null 2>&1 &")
        .await;
    let exit = guest.stop(PATIENCE).await.unwrap();
    assert_eq!(exit.reason, ExitReason::Stopped, "{exit}");
}

/// RCU grace periods are expedited before file systems are frozen, and only for a short time.
async fn grace_periods(guest: &Guest) {
    // Records the setting at the start and each change of it, until it is 0 again.
    let record = "\
        f=/sys/kernel/rcu_expedited last= i=0
        while [ $i -lt 600 ]; do
            read v <$f
            if [ \"$v\" != \"$last\" ]; then
                echo $v
                if [ $v = 0 ] && [ -n \"$last\" ]; then exit; fi
                last=$v
            fi
            i=$((i + 1))
            sleep 0.5
        done";
    let agent = guest.agent();
    let write_out_twice = async {
        for _ in 0..2 {
            agent.write_file_systems_out(PATIENCE).await.unwrap();
        }
    };
    let record = ["sh", "-c", record];
    let recording = run(guest, &record, "", PATIENCE * 3);
    let (recorded, ()) = tokio::join!(recording, write_out_twice);
    let recorded = String::from_utf8(recorded.unwrap().stdout).unwrap();
    let seen: Vec<u32> = recorded.lines().map(|line| line.parse().unwrap()).collect();
    assert!(seen.iter().any(|number| *number > 1), "grace periods were not expedited: {seen:?}");
    assert_eq!(seen.last(), Some(&0), "grace periods stay expedited: {seen:?}");
}

async fn commands(guest: &Guest) {
    let output = run(guest, &["sh", "-c", "cat; echo bad >&2; exit 7"], "in", PATIENCE).await.unwrap();
    let want =
        ExecOutput { exit_code: 7, stdout: b"in".to_vec(), stderr: b"bad\n".to_vec(), truncated: false };
    assert_eq!(output, want);
    let killed = run(guest, &["sh", "-c", "kill -9 $$"], "", PATIENCE).await.unwrap();
    assert_eq!(killed.exit_code, 137);
    let missing = run(guest, &["no-such-program"], "", PATIENCE).await.unwrap_err().to_string();
    assert!(missing.contains("no-such-program"), "{missing}");
    let slow = run(guest, &["sleep", "4242"], "", Duration::from_secs(1)).await.unwrap_err().to_string();
    assert!(slow.contains("'sleep'"), "{slow}");
    assert_eq!(sh(guest, "sleep 1; pgrep -xf 'sleep 4242' || echo none").await, "none");
}
