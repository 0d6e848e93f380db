//! Finds out how QEMU runs on this host: its version, whether its sandbox works, and whether KVM works.
//!
//! `/dev/kvm` alone proves nothing: on some hosts it opens and makes virtual machines, but QEMU aborts when it sets up the processor, or the
//! guest makes no progress. So the probe runs a real guest: a boot sector that counts for a moment and then writes to
//! QEMU's `isa-debug-exit` port. QEMU then ends with an exit code that no other event produces.
//!
//! On some hosts KVM works without virtualisation by the processor: it makes shadow page tables in software and
//! emulates accesses to them. It runs the probe guest, and other guests for a while, until an instruction comes that it
//! cannot emulate. So if the processor reports no virtualisation, the probe rejects KVM.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::sync::OnceCell;

use crate::binary;
use crate::error::{Error, Result};
use crate::launch;

/// How QEMU runs the processors of machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acceleration {
    /// By the processor, through KVM.
    Kvm,
    /// By QEMU's emulation (TCG).
    Tcg {
        /// Why KVM is not used.
        reason: String,
    },
}

impl std::fmt::Display for Acceleration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kvm => f.write_str("KVM"),
            Self::Tcg { reason } => write!(f, "emulation (TCG): {reason}"),
        }
    }
}

/// How long the probe guest may take; with working KVM it needs less than a tenth of a second.
const KVM_TIMEOUT: Duration = Duration::from_secs(2);

/// The same limit for the emulated run, which only fails if QEMU itself is broken.
const TCG_TIMEOUT: Duration = Duration::from_secs(20);

/// The value that the boot sector writes to the exit port; QEMU exits with `value * 2 + 1`.
const EXIT_VALUE: u8 = 0x2a;
const EXIT_CODE: i32 = (EXIT_VALUE as i32) * 2 + 1;
const EXIT_PORT: u8 = 0xf4;

/// The smallest disk on which SeaBIOS looks for a boot sector.
const DISK_BYTES: u64 = 1 << 20;

/// QEMU's system-call filter: it denies a compromised QEMU the calls that QEMU never needs.
pub(crate) const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The features of QEMU on this host.
#[derive(Clone, Debug)]
pub struct Probe {
    /// How to run machines.
    pub acceleration: Acceleration,
    /// Whether QEMU runs with its system-call filter on.
    pub sandbox: bool,
    /// QEMU's version.
    pub version: Version,
}

/// A version of QEMU: major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// Parses the output of `--version`.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("version ")?;
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some(Self(numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
}

/// Finds out how machines can be run here. The first call usually takes a few seconds, and at most about a minute; its
/// result is kept until the process ends. An error (QEMU is missing or does not run at all) is not kept.
pub async fn probe() -> Result<Probe> {
    static RESULT: OnceCell<Probe> = OnceCell::const_new();
    RESULT.get_or_try_init(run_probe).await.cloned()
}

/// The acceleration part of [`probe`].
pub async fn probe_acceleration() -> Result<Acceleration> {
    probe().await.map(|probe| probe.acceleration)
}

async fn run_probe() -> Result<Probe> {
    let qemu = binary::find()?;
    let version = version_of(&qemu).await?;
    let tcg = Trial { accelerator: "tcg", cpu: "max", timeout: TCG_TIMEOUT };
    // The emulated run distinguishes faults of QEMU from faults of KVM. It also shows whether the system-call filter
    // works (it does not if seccomp itself is forbidden).
    let sandbox = match tcg.run(&qemu, true).await? {
        Ok(()) => true,
        Err(with_filter) => match tcg.run(&qemu, false).await? {
            Ok(()) => {
                tracing::warn!(reason = with_filter, "QEMU runs without its system-call filter");
                false
            }
            Err(reason) => {
                return Err(Error::StartFailed {
                    machine: "probe".into(),
                    status: reason,
                    stderr: String::new(),
                });
            }
        },
    };
    let acceleration = match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Err(error) => Acceleration::Tcg { reason: format!("/dev/kvm cannot be opened: {error}") },
        Ok(_) if !processor_virtualises(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()) => {
            Acceleration::Tcg { reason: NO_VIRTUALISATION.into() }
        }
        Ok(_) => {
            let kvm = Trial { accelerator: "kvm", cpu: "host", timeout: KVM_TIMEOUT };
            match kvm.run(&qemu, sandbox).await? {
                Ok(()) => Acceleration::Kvm,
                Err(reason) => Acceleration::Tcg {
                    reason: format!("/dev/kvm opens, but a guest does not run: {reason}"),
                },
            }
        }
    };
    tracing::info!(%acceleration, sandbox, "determined how machines run");
    Ok(Probe { acceleration, sandbox, version })
}

async fn version_of(qemu: &Path) -> Result<Version> {
    let mut command = launch::program(qemu);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let failed =
        |status: String| Error::StartFailed { machine: "probe".into(), status, stderr: String::new() };
    let output = tokio::time::timeout(TCG_TIMEOUT, command.output())
        .await
        .map_err(|_| failed(format!("it did not print its version within {} s", TCG_TIMEOUT.as_secs())))?
        .map_err(Error::io("run", qemu))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first_line = || text.lines().next().unwrap_or_default();
    Version::parse(&text)
        .ok_or_else(|| failed(format!("it printed '{}' instead of its version", first_line())))
}

const NO_VIRTUALISATION: &str = "/dev/kvm opens, but the processor has neither VMX nor SVM (/proc/cpuinfo): KVM \
                            without them stops guests in instructions that it cannot emulate";

/// Whether the processor can run guests, by `/proc/cpuinfo`. If the file has no flags at all, this counts as yes.
fn processor_virtualises(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter_map(|line| line.strip_prefix("flags")).peekable();
    flags.peek().is_none()
        || flags.any(|line| line.split_ascii_whitespace().any(|f| f == "vmx" || f == "svm"))
}

struct Trial {
    accelerator: &'static str,
    cpu: &'static str,
    timeout: Duration,
}

impl Trial {
    /// The outer error is a fault of this host (no space for the boot sector); the inner error says why the guest
    /// did not run.
    async fn run(&self, qemu: &Path, sandbox: bool) -> Result<std::result::Result<(), String>> {
        let disk = boot_disk()?;
        // The disk has no name: QEMU reaches it through this process, and nothing is left behind.
        let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&disk));
        let mut command = launch::program(qemu);
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "64"])
            .args(["-machine", "q35,graphics=off", "-accel", self.accelerator, "-cpu", self.cpu])
            .args(["-device", &format!("isa-debug-exit,iobase={EXIT_PORT:#x},iosize=4")])
            .args(["-drive", &format!("if=none,id=boot,format=raw,readonly=on,file={path}")])
            .args(["-device", "virtio-blk-pci,drive=boot,bootindex=0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if sandbox {
            command.args(["-sandbox", SANDBOX]);
        }
        let mut child = command.spawn().map_err(Error::io("run", qemu))?;
        let mut stderr = child.stderr.take();
        let collected = async {
            let mut text = Vec::new();
            if let Some(stderr) = stderr.as_mut() {
                // If the output cannot be read, the reason is only less complete.
                let _ = stderr.take(64 << 10).read_to_end(&mut text).await;
            }
            (child.wait().await, text)
        };
        let outcome = tokio::time::timeout(self.timeout, collected).await;
        Ok(match outcome {
            Err(_) => {
                // Dropping would kill it too; waiting leaves no zombie.
                let _ = child.kill().await;
                Err(format!("it made no progress within {} s", self.timeout.as_secs()))
            }
            Ok((Err(error), _)) => Err(format!("QEMU could not be waited for: {error}")),
            Ok((Ok(status), _)) if status.code() == Some(EXIT_CODE) => Ok(()),
            Ok((Ok(status), text)) => {
                let text = String::from_utf8_lossy(&text);
                let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
                Err(format!("QEMU ended with {status}: {}", last.trim()))
            }
        })
    }
}

/// A disk whose boot sector counts to a million, writes [`EXIT_VALUE`] to the exit port and halts.
fn boot_disk() -> Result<std::fs::File> {
    #[rustfmt::skip]
    const CODE: [u8; 18] = [
        0x66, 0xb9, 0x40, 0x42, 0x0f, 0x00, // mov ecx, 1_000_000
        0x66, 0x49,                         // dec ecx
        0x75, 0xfc,                         // jnz back to dec
        0xb0, EXIT_VALUE,                   // mov al, EXIT_VALUE
        0xe6, EXIT_PORT,                    // out EXIT_PORT, al
        0xfa, 0xf4,                         // cli; hlt
        0xeb, 0xfc,                         // jmp back to cli
    ];
    let describe = || Error::io("create the probe's boot disk in", Path::new("memory"));
    let file = rustix::fs::memfd_create("headwater-probe", rustix::fs::MemfdFlags::CLOEXEC)
        .map(std::fs::File::from)
        .map_err(|error| describe()(error.into()))?;
    let mut sector = CODE.to_vec();
    sector.resize(510, 0);
    sector.extend_from_slice(&[0x55, 0xaa]);
    std::os::unix::fs::FileExt::write_all_at(&file, &sector, 0).map_err(describe())?;
    file.set_len(DISK_BYTES).map_err(describe())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022\n";
        assert_eq!(Version::parse(debian), Some(Version(7, 2)));
        assert_eq!(Version::parse("QEMU emulator version 10.2.0\n"), Some(Version(10, 2)));
        assert!(Version(9, 1) < Version(9, 2) && Version(9, 2) < Version(10, 0));
        for odd in ["", "version x", "QEMU emulator version 10"] {
            assert_eq!(Version::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_processor_without_vmx_and_svm_is_no_kvm() {
        assert!(processor_virtualises("processor\t: 0\nflags\t\t: fpu vmx sse\nvmx flags\t: ept\n"));
        assert!(processor_virtualises("flags\t\t: fpu svm\n"));
        assert!(!processor_virtualises("processor\t: 0\nflags\t\t: fpu vme hypervisor\nbugs\t: vmx_x\n"));
        assert!(processor_virtualises("processor\t: 0\nFeatures\t: fp asimd\n"), "not x86");
    }
}
