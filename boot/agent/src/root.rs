//! Prepares the mounted root: writes the machine's host name, machine-id and name servers, and configuration that
//! keeps network managers away from the card of the root disk.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use headwater_boot_script::Settings;
use headwater_dhcp::Lease;

use crate::network::Card;

/// The directory on which the root is mounted until the system starts.
const ROOT: &str = "/root";
/// A directory in memory whose configuration the system reads besides that on disk. It is empty again after a reboot.
const RUN: &str = "/run";
/// Targets that are masked. A machine whose disk is in memory cannot suspend to that disk, and a machine whose disk
/// is on the network must not suspend.
const SLEEP: [&str; 4] = ["sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target"];

/// Mounts the root file system.
pub(crate) fn mount(device: &Path) -> anyhow::Result<()> {
    let status = Command::new("/bin/mount")
        .args(["-t", "ext4", "-o", "rw,noatime"])
        .arg(device)
        .arg(ROOT)
        .status()
        .context("cannot run /bin/mount")?;
    if !status.success() {
        bail!("cannot mount {} as ext4: {status}", device.display());
    }
    if !["sbin/init", "usr/lib/systemd/systemd"].iter().any(|init| is_there(&Path::new(ROOT).join(init))) {
        bail!("{} is mounted and has no /sbin/init", device.display());
    }
    Ok(())
}

/// Whether the path exists. A symbolic link counts even if its target does not exist here, because the target may be
/// a path of the mounted root.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Writes the machine's identity, and tells network managers to ignore its card.
pub(crate) fn prepare(settings: &Settings, card: &Card, lease: &Lease) -> anyhow::Result<()> {
    let (root, run) = (Path::new(ROOT), Path::new(RUN));
    identity(root, settings).context("cannot write the host name and machine-id")?;
    names(root, lease).context("cannot write /etc/resolv.conf")?;
    leave_alone(run, card)
        .context("cannot write the configuration that keeps network managers off the card")?;
    for target in SLEEP {
        link(&run.join("systemd/system").join(target)).context("cannot mask the sleep targets of systemd")?;
    }
    Ok(())
}

fn identity(root: &Path, settings: &Settings) -> io::Result<()> {
    let (host_name, machine_id) = (&settings.host_name, &settings.machine_id);
    replace(&root.join("etc/hostname"), &format!("{host_name}\n"))?;
    replace(&root.join("etc/machine-id"), &format!("{machine_id}\n"))?;
    let hosts = root.join("etc/hosts");
    let mut text = fs::read_to_string(&hosts).unwrap_or_default();
    if !text.split_whitespace().any(|word| word == host_name) {
        text.push_str(&format!("127.0.1.1 {host_name}\n"));
        replace(&hosts, &text)?;
    }
    Ok(())
}

/// Writes `/etc/resolv.conf`, unless it is a symbolic link: then another program maintains it.
fn names(root: &Path, lease: &Lease) -> io::Result<()> {
    let file = root.join("etc/resolv.conf");
    if lease.dns.is_empty() || file.is_symlink() {
        return Ok(());
    }
    let text: String = lease.dns.iter().map(|server| format!("nameserver {server}\n")).collect();
    replace(&file, &text)
}

/// Tells systemd-networkd and NetworkManager not to manage the card.
fn leave_alone(run: &Path, card: &Card) -> io::Result<()> {
    let mac = card.mac;
    let networkd = format!("[Match]\nMACAddress={mac}\n\n[Link]\nUnmanaged=yes\n");
    write(&run.join("systemd/network/00-headwater.network"), &networkd)?;
    let manager = format!("[keyfile]\nunmanaged-devices+=mac:{mac}\n");
    write(&run.join("NetworkManager/conf.d/00-headwater.conf"), &manager)
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)
}

/// Replaces a symbolic link instead of following it: its target is meant for the running system, not for the
/// initramfs.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    if path.is_symlink() {
        fs::remove_file(path)?;
    }
    write(path, text)
}

fn link(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    std::os::unix::fs::symlink("/dev/null", path)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn settings() -> Settings {
        Settings {
            machine: "pc-1".into(),
            host_name: "desk".into(),
            machine_id: "00112233445566778899aabbccddeeff".into(),
            mac: "52:54:00:00:00:01".into(),
            version: "debian@3".into(),
            manifest: "0".into(),
            servers: "https://10.0.0.2:8443".into(),
            root_partition: 1,
            cache_ram_bytes: 1 << 28,
            now_ms: 0,
        }
    }

    #[test]
    fn the_identity_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let etc = dir.path().join("etc");
        fs::create_dir(&etc).unwrap();
        fs::write(etc.join("hosts"), "127.0.0.1 localhost\n").unwrap();
        // It leads out of the root.
        std::os::unix::fs::symlink("/proc/sys/kernel/hostname", etc.join("hostname")).unwrap();
        for _ in 0..2 {
            identity(dir.path(), &settings()).unwrap();
        }
        let read = |name: &str| fs::read_to_string(etc.join(name)).unwrap();
        assert_eq!(
            (read("hostname"), read("machine-id")),
            ("desk\n".into(), format!("{}\n", settings().machine_id))
        );
        assert_eq!(read("hosts"), "127.0.0.1 localhost\n127.0.1.1 desk\n");
    }

    #[test]
    fn name_servers_are_written_unless_another_program_does() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("etc")).unwrap();
        let lease = Lease {
            address: Ipv4Addr::new(10, 0, 0, 5),
            prefix: 24,
            router: None,
            dns: vec![Ipv4Addr::new(10, 0, 0, 1)],
            server: Ipv4Addr::new(10, 0, 0, 1),
            seconds: 600,
        };
        names(dir.path(), &lease).unwrap();
        let file = dir.path().join("etc/resolv.conf");
        assert_eq!(fs::read_to_string(&file).unwrap(), "nameserver 10.0.0.1\n");
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("../run/resolved", &file).unwrap();
        names(dir.path(), &lease).unwrap();
        assert!(file.is_symlink());
    }

    #[test]
    fn network_managers_are_told_to_ignore_the_card() {
        let dir = tempfile::tempdir().unwrap();
        let card = Card { name: "eth0".into(), mac: "52:54:00:00:00:01".parse().unwrap() };
        leave_alone(dir.path(), &card).unwrap();
        let networkd = fs::read_to_string(dir.path().join("systemd/network/00-headwater.network")).unwrap();
        assert!(networkd.contains("MACAddress=52:54:00:00:00:01\n") && networkd.contains("Unmanaged=yes\n"));
        let manager = fs::read_to_string(dir.path().join("NetworkManager/conf.d/00-headwater.conf")).unwrap();
        assert!(manager.contains("unmanaged-devices+=mac:52:54:00:00:00:01\n"));
    }
}
