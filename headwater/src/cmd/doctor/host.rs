//! Checks of the host: QEMU and KVM, the kernel, the service, ports and the clock.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, SystemTime};

use headwater_block::size;
use headwater_qemu::probe::{Version, probe};
use headwater_qemu::{Acceleration, firmware};
use rustix::process::{Resource, getrlimit};

use super::Check;
use crate::client::Client;
use crate::config::Effective;
use crate::data_dir::DataDir;

/// The oldest QEMU with which Headwater is tested: that of Debian 12.
const TESTED_QEMU: Version = Version(7, 2);

/// Timeout of the daemon's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Locked memory for the keys of 64 machines.
const LOCKED_BYTES: u64 = 64 << 10;

/// 2026-01-01, which is before this program was written.
const EARLIEST_UNIX_S: u64 = 1_767_225_600;

/// Checks QEMU, and whether KVM can run a guest.
pub async fn qemu() -> Vec<Check> {
    let found = match probe().await {
        Ok(found) => found,
        Err(error) => {
            let why = crate::failure::one_line(&anyhow::Error::new(error));
            let advice = "install it: 'apt-get install qemu-system-x86'; disks can be served without it";
            return vec![Check::fail("qemu", format!("machines need QEMU: {why}"), advice)];
        }
    };
    let Version(major, minor) = found.version;
    let version = format!("QEMU {major}.{minor} ran a guest");
    let mut checks = vec![if found.version < TESTED_QEMU {
        Check::warn("qemu", version, "Headwater is tested with QEMU 7.2 and later: upgrade it")
    } else {
        Check::ok("qemu", version)
    }];
    checks.push(if found.sandbox {
        Check::ok("qemu sandbox", "QEMU's filter of system calls works")
    } else {
        let advice =
            "allow seccomp to this user or container: without it a guest that exploits QEMU gets more access to the host";
        Check::warn("qemu sandbox", "QEMU ran only without its filter of system calls", advice)
    });
    checks.push(match found.acceleration {
        Acceleration::Kvm => Check::ok("kvm", "/dev/kvm ran a guest"),
        Acceleration::Tcg { reason } => Check::warn(
            "kvm",
            format!("machines are emulated, and about ten times slower: {reason}"),
            "switch virtualisation on in the firmware, or nested virtualisation for a virtual host; /dev/kvm belongs to the \
             group kvm: 'adduser USER kvm'",
        ),
    });
    checks
}

/// Checks for the program that writes VHD, VHDX and VMDK.
pub fn qemu_img() -> Check {
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).map(|dir| dir.join("qemu-img")).find(|file| file.is_file()) {
        Some(file) => Check::ok("qemu-img", format!("{} is installed", file.display())),
        None => Check::warn(
            "qemu-img",
            "there is no qemu-img in PATH: images cannot be exported as VHD, VHDX or VMDK",
            "install it: 'apt-get install qemu-utils'",
        ),
    }
}

/// Checks for the firmware of machines that boot by UEFI.
pub fn ovmf() -> Check {
    let install = "install it for such machines: 'apt-get install ovmf'";
    match [false, true].map(|secure_boot| firmware::find(secure_boot).is_ok()) {
        [_, true] => Check::ok("ovmf", "OVMF is installed, also for Secure Boot"),
        [true, false] => Check::warn(
            "ovmf",
            "there is no OVMF for Secure Boot with Microsoft's keys: machines with --secure-boot cannot start",
            "install it for such machines: Debian and Ubuntu: 'apt-get install ovmf', Fedora: package edk2-ovmf, openSUSE: package \
             qemu-ovmf-x86_64; Arch has no package with these keys",
        ),
        [false, false] => {
            Check::warn("ovmf", "OVMF is not installed: machines that boot by UEFI cannot start", install)
        }
    }
}

/// Checks for the TPM emulator.
pub fn swtpm() -> Check {
    match headwater_qemu::tpm::check() {
        Ok(()) => Check::ok("swtpm", "swtpm is installed"),
        Err(_) => Check::warn(
            "swtpm",
            "there is no swtpm in PATH: machines with --tpm cannot start",
            "install it for such machines: 'apt-get install swtpm'",
        ),
    }
}

/// Checks whether this process may use io_uring.
pub fn io_uring() -> Check {
    match io_uring::IoUring::new(8) {
        Ok(_) => Check::ok("io_uring", "io_uring works"),
        Err(error) => Check::warn(
            "io_uring",
            format!(
                "io_uring does not work ({error}): overflow files are read and written by threads, which is slower"
            ),
            "allow it: 'sysctl kernel.io_uring_disabled=0', and io_uring_setup in the container's seccomp profile",
        ),
    }
}

/// Checks whether the kernel can restrict the disk process to its own files.
pub fn landlock() -> Check {
    const CHECK: &str = "landlock";
    match crate::disk_process::landlock_lacks() {
        None => Check::ok(CHECK, "the disk process can open no files except its own"),
        Some(0) => Check::warn(
            CHECK,
            "this kernel has no Landlock: the disk process can open every file that its user can",
            "use Linux 5.13 or later, with 'landlock' in the list of /sys/kernel/security/lsm (kernel parameter lsm=)",
        ),
        Some(version) => Check::warn(
            CHECK,
            format!(
                "this kernel has an old Landlock (version {version} or the next one): the disk process is restricted in part"
            ),
            "use Linux 6.12 or later",
        ),
    }
}

/// Checks whether the keys of write caches can be locked in memory, out of swap.
pub fn locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let shown = limit.map_or_else(|| "not limited".to_owned(), size::format);
    let found = format!("the limit of locked memory (ulimit -l) here is {shown}");
    if limit.is_none_or(|bytes| bytes >= LOCKED_BYTES) {
        Check::ok("locked memory", format!("{found}, enough for the keys of 64 write caches"))
    } else {
        let needed = size::format(LOCKED_BYTES);
        Check::warn(
            "locked memory",
            format!(
                "{found}: the keys of 64 write caches need {needed}, and further keys could be written to swap"
            ),
            "raise it with 'ulimit -l', or with LimitMEMLOCK=64M in the unit of the daemon; or encrypt the swap",
        )
    }
}

/// Whether the memory of write caches can have huge pages.
pub fn huge_pages() -> Check {
    const CHECK: &str = "huge pages";
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Ok(setting) = std::fs::read_to_string(SETTING) else {
        return Check::ok(CHECK, "this kernel has no huge pages for shared memory");
    };
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or_default();
    if matches!(chosen, "advise" | "within_size" | "always" | "force") {
        return Check::ok(CHECK, format!("memory of write caches may have huge pages ({chosen})"));
    }
    Check::warn(
        CHECK,
        format!(
            "memory of write caches has no huge pages (shmem_enabled is '{chosen}'): copies of blocks in RAM take longer"
        ),
        format!("echo advise >{SETTING}"),
    )
}

/// The daemon of the data directory, and whether it answered.
pub async fn daemon(dir: &DataDir) -> (Check, bool) {
    let client = Client::new(dir.socket());
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.status()).await;
    match answer {
        Ok(Ok(status)) => {
            let found = format!("version {} answers at {}", status.version, dir.socket().display());
            let alarms = status.alarms.len();
            let check = match alarms {
                0 => Check::ok("daemon", found),
                _ => {
                    Check::warn("daemon", format!("{found}, with {alarms} alarms"), "see 'headwater status'")
                }
            };
            (check, true)
        }
        Ok(Err(error)) => {
            let advice = "start it: 'systemctl start headwater', or 'headwater serve'; its log: 'journalctl -u headwater'";
            (Check::warn("daemon", crate::failure::one_line(&error), advice), false)
        }
        Err(_) => {
            let found =
                format!("{} does not answer within {} s", dir.socket().display(), ANSWER_TIMEOUT.as_secs());
            (Check::fail("daemon", found, "look at its log: 'journalctl -u headwater'"), true)
        }
    }
}

/// Checks the ports of the configuration file, which a running daemon itself uses.
pub fn ports(settings: Option<&Effective>, daemon_answers: bool) -> Vec<Check> {
    let Some(Effective { args, .. }) = settings else { return Vec::new() };
    let addresses = [("listen", args.listen), ("console", args.console), ("store-listen", args.store_listen)];
    let wanted = addresses.into_iter().filter_map(|(key, address)| Some((key, address?)));
    wanted.map(|(key, address)| port(key, address, daemon_answers)).collect()
}

fn port(key: &str, address: SocketAddr, daemon_answers: bool) -> Check {
    match TcpListener::bind(address) {
        Ok(_) if daemon_answers => Check::warn(
            "port",
            format!("{address} ({key}) is free, although the daemon runs"),
            "the setting was changed after the daemon started: restart the daemon",
        ),
        Ok(_) => Check::ok("port", format!("{address} ({key}) is free")),
        Err(e) if e.kind() == std::io::ErrorKind::AddrInUse && daemon_answers => {
            Check::ok("port", format!("{address} ({key}) is in use, and the daemon runs"))
        }
        Err(e) => Check::fail(
            "port",
            format!("cannot listen at {address} ({key}): {e}"),
            "choose another port in the configuration, or end the process that uses it ('ss -ltnp')",
        ),
    }
}

/// Checks the clock, on which tokens, certificates and scheduled promotions depend.
pub fn clock() -> Check {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let shown = crate::show::time(now.saturating_mul(1000));
    if now < EARLIEST_UNIX_S {
        let advice = "set the clock: 'timedatectl set-ntp true'";
        return Check::fail(
            "clock",
            format!("the time is {shown}, which is before this program was written"),
            advice,
        );
    }
    let synchronised = [
        "/run/systemd/timesync/synchronized",
        "/run/chrony/chronyd.pid",
        "/run/chronyd.pid",
        "/run/ntpd.pid",
    ];
    match synchronised.into_iter().find(|file| Path::new(file).exists()) {
        Some(file) => Check::ok("clock", format!("the time is {shown}, kept by a time service ({file})")),
        None => Check::warn(
            "clock",
            format!("the time is {shown}; no time service of systemd, chrony or ntpd was found here"),
            "'timedatectl set-ntp true', unless the host of this virtual machine keeps its clock",
        ),
    }
}
