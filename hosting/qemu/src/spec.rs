//! The description of a machine, and the QEMU command line for it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::json;
use uuid::Uuid;

use crate::bridge;
use crate::error::{Error, Result};
use crate::firmware::UefiFiles;
use crate::probe::{Acceleration, SANDBOX, Version};

/// The usual size of a disk's sectors.
const SECTOR_BYTES: u32 = 512;

/// The longest path of a unix socket on Linux, in bytes, without the closing NUL.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The least memory that a guest gets.
pub const MIN_MEMORY_BYTES: u64 = 64 << 20;

/// The most processors that a guest gets.
pub const MAX_CPUS: u32 = 255;

/// Memory for translated code of an emulated guest, in MiB. QEMU's own default is up to 1 GiB a guest.
const TCG_CODE_MIB: u32 = 256;

/// A network card's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl std::fmt::Display for MacAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bad = || format!("'{text}' is not a MAC address; write for instance 52:54:00:12:34:56");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(bad)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() {
            return Err(bad());
        }
        Ok(Self(bytes))
    }
}

/// How a machine reaches its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskTransport {
    /// vhost-user-blk: rings and buffers are shared memory, so the machine's memory is a shared memfd. The
    /// fastest; QEMU reconnects if the server restarts.
    VhostUser,
    /// NBD: for servers that do not share memory with the machine. A write that finds no space pauses the machine.
    Nbd {
        /// Name of the export.
        export: String,
    },
}

/// The disk of a machine, served on a unix socket.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Socket of the server.
    pub socket: PathBuf,
    /// The protocol on that socket.
    pub transport: DiskTransport,
    /// Size of its sectors. Over vhost-user the server reports it.
    pub sector_bytes: u32,
}

impl Disk {
    /// A disk over vhost-user-blk.
    pub fn vhost_user(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), transport: DiskTransport::VhostUser, sector_bytes: SECTOR_BYTES }
    }

    /// The same disk with sectors of this size.
    #[must_use]
    pub fn with_sectors(self, sector_bytes: u32) -> Self {
        Self { sector_bytes, ..self }
    }

    /// A disk over NBD.
    pub fn nbd(socket: impl Into<PathBuf>, export: impl Into<String>) -> Self {
        Self {
            socket: socket.into(),
            transport: DiskTransport::Nbd { export: export.into() },
            sector_bytes: SECTOR_BYTES,
        }
    }
}

/// The serial number of a machine's disk, which the guest shows in `/dev/disk/by-id`: the beginning of its UUID,
/// because virtio has room for 20 bytes.
pub fn disk_serial(uuid: Uuid) -> String {
    let mut serial = uuid.simple().to_string();
    serial.truncate(20);
    serial
}

/// The serial number of a machine's scratch disk, by which its guest finds it.
pub const SCRATCH_SERIAL: &str = "headwater-scratch";

/// The first QEMU version that accepts `reconnect-ms`. `reconnect`, in seconds, is deprecated from then on, and removed
/// in 10.2.
const RECONNECTS_IN_MS: Version = Version(9, 2);

/// How long QEMU waits for a disk over NBD whose server has ended, before its requests fail: a day, because a disk that does not come back
/// ends its machine.
const RECONNECT_DELAY_S: u32 = 24 * 3600;

/// Most queues of a disk over vhost-user; the server has a thread for each.
const MAX_DISK_QUEUES: u32 = 8;

/// The firmware of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS, which is part of QEMU.
    #[default]
    Bios,
    /// OVMF, see [`crate::firmware::prepare`].
    Uefi(UefiFiles),
}

/// The display of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Display {
    /// No display and no graphics card.
    #[default]
    None,
    /// VNC on [`RunFiles::display_socket`], without a password, because only the socket's owner can open it.
    Vnc,
}

/// The network of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// No network card.
    #[default]
    None,
    /// QEMU's user-mode network: outgoing connections through the host with address translation, no incoming ones.
    User,
    /// A port of this bridge of the host, see [`crate::bridge`].
    Bridge(String),
}

/// What happens when the guest's operating system restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReboot {
    /// The machine continues with the same disk.
    #[default]
    Continue,
    /// QEMU ends with [`crate::ExitReason::Rebooted`], so that the caller can reset the disk before the
    /// next boot.
    Exit,
}

/// A machine to start.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Its name, shown in errors, in the process list and as SMBIOS serial number.
    pub name: String,
    /// Its identity for the firmware (SMBIOS); Linux derives the machine-id of a fresh image from it.
    pub uuid: Uuid,
    /// Address of its network card, if it has one.
    pub mac: MacAddress,
    /// Memory; at least [`MIN_MEMORY_BYTES`].
    pub memory_bytes: u64,
    /// Memory of the host, for all programs.
    pub host_memory_bytes: u64,
    /// Processors: 1 to [`MAX_CPUS`].
    pub cpus: u32,
    /// Its disk, which it boots from.
    pub disk: Disk,
    /// Its scratch disk, with the serial number [`SCRATCH_SERIAL`]; reached as the disk is.
    pub scratch: Option<Disk>,
    /// The NoCloud disk with its identity, see [`crate::seed`].
    pub seed: Option<PathBuf>,
    /// Directory of its own for sockets, logs and the pid file, see [`RunFiles`]. Created if missing.
    pub run_dir: PathBuf,
    /// Its firmware.
    pub firmware: Firmware,
    /// The directory with the state of its TPM 2.0, if it has one: [`RunFiles::tpm_state`] for a TPM that ends with
    /// this run, else a directory that the caller keeps.
    pub tpm: Option<PathBuf>,
    /// Its display.
    pub display: Display,
    /// Its network.
    pub network: Network,
    /// KVM or emulation; normally the result of [`crate::probe_acceleration`].
    pub acceleration: Acceleration,
    /// The effect of a restart by the guest.
    pub on_reboot: OnReboot,
}

/// The paths of the files of a running machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFiles {
    /// The directory.
    pub dir: PathBuf,
}

impl RunFiles {
    /// The files under `dir`.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf() }
    }

    /// Socket of QEMU's monitor; taken while the machine runs.
    pub fn monitor_socket(&self) -> PathBuf {
        self.dir.join("qmp.sock")
    }

    /// Socket of the guest agent; taken while the machine runs.
    pub fn agent_socket(&self) -> PathBuf {
        self.dir.join("agent.sock")
    }

    /// Socket of the serial console, for one client at a time; its input goes to the guest.
    pub fn console_socket(&self) -> PathBuf {
        self.dir.join("console.sock")
    }

    /// Log of the serial console since the start.
    pub fn console_log(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// Log of QEMU's own output.
    pub fn qemu_log(&self) -> PathBuf {
        self.dir.join("qemu.log")
    }

    /// Process number and start time of QEMU.
    pub fn pid_file(&self) -> PathBuf {
        self.dir.join("qemu.pid")
    }

    /// Socket of the display, for VNC clients.
    pub fn display_socket(&self) -> PathBuf {
        self.dir.join("vnc.sock")
    }

    /// The file into which QEMU writes pictures of the display.
    pub fn screen_dump(&self) -> PathBuf {
        self.dir.join("screen.ppm")
    }

    /// The variables of a UEFI firmware that go with this run of the machine.
    pub fn firmware_variables(&self) -> PathBuf {
        self.dir.join("firmware-vars.fd")
    }

    /// The state of a TPM that ends with this run of the machine.
    pub fn tpm_state(&self) -> PathBuf {
        self.dir.join("tpm")
    }

    /// Socket between QEMU and the TPM; taken while the machine runs.
    pub fn tpm_socket(&self) -> PathBuf {
        self.dir.join("tpm.sock")
    }

    /// Process number and start time of the TPM.
    pub fn tpm_pid_file(&self) -> PathBuf {
        self.dir.join("tpm.pid")
    }

    /// Log of the TPM.
    pub fn tpm_log(&self) -> PathBuf {
        self.dir.join("tpm.log")
    }

    /// The usual place of the seed disk.
    pub fn seed_disk(&self) -> PathBuf {
        self.dir.join("seed.img")
    }
}

/// Checks whether a host with this much memory can run a machine of this size. The error has the reason and the
/// possible values.
pub fn check_size(memory_bytes: u64, cpus: u32, host_memory_bytes: u64) -> std::result::Result<(), String> {
    let mib = |bytes: u64| bytes >> 20;
    if cpus == 0 || cpus > MAX_CPUS {
        return Err(format!("it cannot have {cpus} processors; use 1 to {MAX_CPUS}"));
    }
    if memory_bytes < MIN_MEMORY_BYTES {
        return Err(format!(
            "{memory_bytes} bytes of memory are too few; give it {} MiB or more",
            mib(MIN_MEMORY_BYTES)
        ));
    }
    if memory_bytes > host_memory_bytes {
        return Err(format!(
            "it would have {} MiB of memory, but this host has only {} MiB; give the machine less memory",
            mib(memory_bytes),
            mib(host_memory_bytes)
        ));
    }
    Ok(())
}

impl GuestSpec {
    /// The guest's memory as QEMU takes it: it rounds a size up to 8 KiB, and then refuses a file of memory that is
    /// shorter.
    fn memory_kib(&self) -> u64 {
        self.memory_bytes >> 13 << 3
    }

    /// The files of this machine.
    pub fn files(&self) -> RunFiles {
        RunFiles::new(&self.run_dir)
    }

    fn error(&self, reason: String) -> Error {
        Error::Spec { machine: self.name.clone(), reason }
    }

    /// Checks everything that can be checked before QEMU runs.
    pub fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.chars().any(|c| c.is_control()) {
            return Err(self.error("its name is empty or has control characters".into()));
        }
        check_size(self.memory_bytes, self.cpus, self.host_memory_bytes)
            .map_err(|reason| self.error(reason))?;
        let files = self.files();
        let sockets = [files.monitor_socket(), files.agent_socket(), files.console_socket()];
        let others = [files.display_socket(), files.tpm_socket(), self.disk.socket.clone()];
        let scratch = self.scratch.as_ref().map(|scratch| scratch.socket.clone());
        for socket in sockets.into_iter().chain(others).chain(scratch) {
            let len = socket.as_os_str().as_bytes().len();
            if len > MAX_SOCKET_PATH_BYTES {
                return Err(self.error(format!(
                    "the socket path {} has {len} bytes, and Linux allows {MAX_SOCKET_PATH_BYTES}; use a data \
                     directory with a shorter path",
                    socket.display()
                )));
            }
        }
        // swtpm cannot be given such a path.
        let has_comma = |path: &&PathBuf| path.as_os_str().as_bytes().contains(&b',');
        if let Some(state) = self.tpm.as_ref().filter(has_comma) {
            return Err(self.error(format!(
                "a TPM cannot be kept in {}, whose path has a comma; use a data directory without one",
                state.display()
            )));
        }
        Ok(())
    }

    /// The arguments of a QEMU of this version. `sandbox` tells whether the system-call filter works here.
    pub fn arguments(&self, sandbox: bool, version: Version) -> Vec<OsString> {
        let mut line = CommandLine::default();
        self.machine(&mut line, sandbox);
        self.disks(&mut line, version);
        self.channels(&mut line);
        self.tpm(&mut line);
        self.screen(&mut line);
        self.card(&mut line);
        line.0
    }

    fn tpm(&self, line: &mut CommandLine) {
        if self.tpm.is_some() {
            let socket = escape(&self.files().tpm_socket().to_string_lossy());
            line.option("-chardev", format!("socket,id=tpm-socket,path={socket}"));
            line.option("-tpmdev", "emulator,id=tpm0,chardev=tpm-socket");
            line.option("-device", "tpm-crb,tpmdev=tpm0");
        }
    }

    fn screen(&self, line: &mut CommandLine) {
        line.option("-display", "none");
        if self.display == Display::Vnc {
            line.option("-vnc", format!("unix:{}", escape(&self.files().display_socket().to_string_lossy())));
            // Firmware and every system have a driver for this card.
            line.option("-device", "VGA,id=video0");
            // A tablet sends absolute positions, so the viewer's pointer and the guest's pointer are in the same place.
            line.option("-device", "qemu-xhci,id=usb0");
            line.option("-device", "usb-tablet,bus=usb0.0");
        }
    }

    fn card(&self, line: &mut CommandLine) {
        match &self.network {
            // Without `-nic none` QEMU 7.2 warns about nothing and adds nothing, thanks to -nodefaults.
            Network::None => return,
            Network::User => line.option("-netdev", "user,id=net0"),
            // QEMU makes the tap. The kernel removes it when QEMU ends, even if QEMU is killed.
            Network::Bridge(_) => {
                let tap = bridge::tap_name(self.uuid);
                line.option("-netdev", format!("tap,id=net0,ifname={tap},script=no,downscript=no"));
            }
        }
        line.option("-device", format!("virtio-net-pci,netdev=net0,mac={},romfile=", self.mac));
    }

    fn machine(&self, line: &mut CommandLine, sandbox: bool) {
        line.flag("-nodefaults");
        line.flag("-no-user-config");
        line.option("-name", format!("guest={},debug-threads=on", escape(&self.name)));
        line.option("-uuid", self.uuid.to_string());
        let serial = escape(&self.name);
        line.option(
            "-smbios",
            format!("type=1,manufacturer=QEMU,product=Headwater machine,serial={serial},uuid={}", self.uuid),
        );
        // Graphics off makes the firmware talk on the serial line, so "no bootable device" is in its log. Guest memory
        // is left out of core dumps. It is not merged with the memory of other guests, because the timing of writes
        // would reveal another guest's contents.
        // A secure firmware changes its variables in system management mode alone, where no guest is.
        let is_secure = matches!(&self.firmware, Firmware::Uefi(files) if files.secure_boot);
        let smm = if is_secure { "on" } else { "off" };
        let machine = format!(
            "q35,graphics=off,vmport=off,smm={smm},sata=off,hpet=off,dump-guest-core=off,mem-merge=off"
        );
        if is_secure {
            line.option("-global", "driver=cfi.pflash01,property=secure,value=on");
        }
        let flash = match &self.firmware {
            Firmware::Bios => "",
            Firmware::Uefi(files) => {
                line.option("-blockdev", flash("firmware-code", &files.code, true));
                line.option("-blockdev", flash("firmware-vars", &files.variables, false));
                ",pflash0=firmware-code,pflash1=firmware-vars"
            }
        };
        match self.disk.transport {
            DiskTransport::VhostUser => {
                let bytes = self.memory_kib() << 10;
                line.option(
                    "-object",
                    format!("memory-backend-memfd,id=ram0,size={bytes},share=on,dump=off,merge=off"),
                );
                line.option("-machine", format!("{machine}{flash},memory-backend=ram0"));
            }
            DiskTransport::Nbd { .. } => line.option("-machine", format!("{machine}{flash}")),
        }
        match self.acceleration {
            Acceleration::Kvm => {
                line.option("-accel", "kvm");
                line.option("-cpu", "host");
            }
            Acceleration::Tcg { .. } => {
                line.option("-accel", format!("tcg,thread=multi,tb-size={TCG_CODE_MIB}"));
                line.option("-cpu", "max");
            }
        }
        line.option("-smp", self.cpus.to_string());
        line.option("-m", format!("size={}k", self.memory_kib()));
        line.option("-rtc", "base=utc");
        line.option("-msg", "timestamp=on");
        line.option("-object", "rng-builtin,id=rng0");
        line.option("-device", "virtio-rng-pci,rng=rng0");
        if self.on_reboot == OnReboot::Exit {
            line.flag("-no-reboot");
        }
        if sandbox {
            line.option("-sandbox", SANDBOX);
        }
    }

    fn disks(&self, line: &mut CommandLine, version: Version) {
        let named = Named {
            socket: "disk-socket",
            node: "disk0",
            place: "id=disk0,bootindex=0",
            serial: &disk_serial(self.uuid),
            queues: self.cpus.min(MAX_DISK_QUEUES),
        };
        if matches!(self.disk.transport, DiskTransport::Nbd { .. }) {
            line.option("-object", "iothread,id=disk-thread");
        }
        named_disk(line, version, &self.disk, &named);
        if let Some(seed) = &self.seed {
            let seed = json!({
                "driver": "raw",
                "node-name": "seed0",
                "read-only": true,
                "file": { "driver": "file", "filename": seed.to_string_lossy() },
            });
            line.option("-blockdev", seed.to_string());
            line.option("-device", "virtio-blk-pci,drive=seed0,id=seed0,serial=headwater-seed");
        }
        // Last, so that the names of the other disks do not depend on it.
        if let Some(scratch) = &self.scratch {
            let named = Named {
                socket: "scratch-socket",
                node: "scratch0",
                place: "id=scratch0",
                serial: SCRATCH_SERIAL,
                queues: 1,
            };
            named_disk(line, version, scratch, &named);
        }
    }

    fn channels(&self, line: &mut CommandLine) {
        let files = self.files();
        line.option("-chardev", socket_chardev("qmp", &files.monitor_socket()));
        line.option("-mon", "chardev=qmp,mode=control");
        // Appending lets the supervisor cut the log off while QEMU has it open.
        let log = escape(&files.console_log().to_string_lossy());
        let console = socket_chardev("console", &files.console_socket());
        line.option("-chardev", format!("{console},logfile={log},logappend=on"));
        line.option("-serial", "chardev:console");
        line.option("-chardev", socket_chardev("agent", &files.agent_socket()));
        line.option("-device", "virtio-serial-pci");
        line.option("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0");
    }
}

/// A disk as QEMU's arguments name it.
struct Named<'a> {
    socket: &'a str,
    node: &'a str,
    /// Identity of its device, and whether it boots.
    place: &'a str,
    serial: &'a str,
    queues: u32,
}

fn named_disk(line: &mut CommandLine, version: Version, disk: &Disk, named: &Named<'_>) {
    match &disk.transport {
        DiskTransport::VhostUser => vhost_user_disk(line, version, disk, named),
        DiskTransport::Nbd { export } => nbd_disk(line, disk, export, named),
    }
}

fn vhost_user_disk(line: &mut CommandLine, version: Version, disk: &Disk, named: &Named<'_>) {
    let Named { socket, place, queues, .. } = named;
    let path = escape(&disk.socket.to_string_lossy());
    let reconnect = if version < RECONNECTS_IN_MS { "reconnect=1" } else { "reconnect-ms=1000" };
    line.option("-chardev", format!("socket,id={socket},path={path},{reconnect}"));
    line.option("-device", format!("vhost-user-blk-pci,chardev={socket},{place},num-queues={queues}"));
}

fn nbd_disk(line: &mut CommandLine, disk: &Disk, export: &str, named: &Named<'_>) {
    let Named { node, place, serial, .. } = named;
    // JSON, because paths and export names may hold commas.
    let block = json!({
        "driver": "nbd",
        "node-name": node,
        "server": { "type": "unix", "path": disk.socket.to_string_lossy() },
        "export": export,
        // If the disk process crashes, the next one listens soon. Requests without an answer are sent again.
        "reconnect-delay": RECONNECT_DELAY_S,
        "discard": "unmap",
        "detect-zeroes": "off",
    });
    line.option("-blockdev", block.to_string());
    // A write that finds no space pauses the machine (werror=enospc) instead of damaging its file
    // system. The supervisor continues the machine, and the write is tried again.
    // QEMU ignores the server's sector size, and assumes 512 bytes unless the size is given here.
    let sectors = match disk.sector_bytes {
        SECTOR_BYTES => String::new(),
        other => format!(",logical_block_size={other},physical_block_size={other}"),
    };
    line.option(
        "-device",
        format!(
            "virtio-blk-pci,drive={node},{place},iothread=disk-thread,serial={serial},discard=on,write-zeroes=on,\
             werror=enospc,rerror=report{sectors}"
        ),
    );
}

/// A flash chip of the board, as a JSON argument: paths may hold commas.
fn flash(node: &str, path: &Path, is_read_only: bool) -> String {
    let file = json!({ "driver": "file", "filename": path.to_string_lossy() });
    json!({ "driver": "raw", "node-name": node, "read-only": is_read_only, "file": file }).to_string()
}

/// The argument that opens a listening socket. An orphan is recognised by it, see [`crate::orphan`].
pub(crate) fn socket_chardev(id: &str, path: &Path) -> String {
    format!("socket,id={id},path={},server=on,wait=off", escape(&path.to_string_lossy()))
}

/// Commas separate QEMU's options, so a comma inside a value is doubled.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

#[derive(Default)]
struct CommandLine(Vec<OsString>);

impl CommandLine {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.into());
    }

    fn option(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Version = Version(7, 2);

    fn spec() -> GuestSpec {
        GuestSpec {
            name: "lab,1".into(),
            uuid: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
            mac: MacAddress([0x52, 0x54, 0, 1, 2, 3]),
            memory_bytes: 256 << 20,
            host_memory_bytes: 1 << 30,
            cpus: 1,
            disk: Disk::nbd("/run/a,b/nbd.sock", "x"),
            scratch: None,
            seed: None,
            run_dir: "/run/a,b".into(),
            firmware: Firmware::Bios,
            tpm: None,
            display: Display::None,
            network: Network::None,
            acceleration: Acceleration::Kvm,
            on_reboot: OnReboot::Continue,
        }
    }

    #[test]
    fn mac_addresses_are_parsed_and_printed() {
        let mac: MacAddress = "52:54:00:12:34:aB".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:12:34:ab");
        for bad in ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "52:54:00:12:34:5", "zz:54:00:12:34:56"] {
            assert!(bad.parse::<MacAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_impossible_machine_is_refused_with_the_reason() {
        assert!(spec().check().is_ok());
        let refused = |change: fn(&mut GuestSpec), words: &str| {
            let mut spec = spec();
            change(&mut spec);
            let error = spec.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(|s| s.cpus = 0, "1 to 255");
        refused(|s| s.memory_bytes = 1 << 20, "64 MiB or more");
        refused(|s| s.memory_bytes = 2 << 30, "2048 MiB of memory, but this host has only 1024 MiB");
        refused(|s| s.run_dir = format!("/{}", "x".repeat(120)).into(), "Linux allows 107");
        refused(|s| s.name.clear(), "empty");
        refused(|s| s.tpm = Some("/run/a,b/tpm".into()), "/run/a,b/tpm, whose path has a comma");
    }

    #[test]
    fn commas_in_names_and_paths_reach_qemu_unchanged() {
        let arguments: Vec<String> =
            spec().arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap()).collect();
        assert!(arguments.iter().any(|a| a == "guest=lab,,1,debug-threads=on"));
        assert!(arguments.iter().any(|a| a.contains("path=/run/a,,b/qmp.sock,server")));
        assert!(arguments.iter().any(|a| a.contains(r#""path":"/run/a,b/nbd.sock""#)));
    }

    #[test]
    fn only_a_secure_firmware_has_system_management_mode() {
        for secure_boot in [false, true] {
            let files = UefiFiles { code: "/code".into(), variables: "/run/a,b/vars".into(), secure_boot };
            let spec = GuestSpec { firmware: Firmware::Uefi(files), ..spec() };
            let arguments: Vec<String> =
                spec.arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap()).collect();
            let has = |text: &str| arguments.iter().any(|a| a.contains(text));
            assert!(has("pflash0=firmware-code,pflash1=firmware-vars"));
            assert_eq!(has(",smm=on,"), secure_boot);
            assert_eq!(has(",smm=off,"), !secure_boot);
            assert_eq!(has("driver=cfi.pflash01,property=secure,value=on"), secure_boot);
        }
    }

    #[test]
    fn a_disk_over_nbd_has_its_large_sectors() {
        let disk = |sector_bytes| {
            let spec =
                GuestSpec { disk: Disk::nbd("/run/nbd.sock", "").with_sectors(sector_bytes), ..spec() };
            let arguments = spec.arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap());
            arguments.into_iter().find(|a| a.contains("id=disk0,")).unwrap()
        };
        assert!(disk(4096).ends_with(",logical_block_size=4096,physical_block_size=4096"));
        assert!(!disk(512).contains("block_size"));
    }

    #[test]
    fn a_disk_over_nbd_has_a_serial_number_of_its_own() {
        let arguments: Vec<String> =
            spec().arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap()).collect();
        assert!(
            arguments.iter().any(|a| a.contains("id=disk0,") && a.contains(",serial=0123456789abcdef0123,"))
        );
        assert_ne!(disk_serial(Uuid::from_u128(1 << 64)), disk_serial(Uuid::from_u128(2 << 64)));
    }

    #[test]
    fn vhost_user_disks_share_memory_with_a_queue_per_processor() {
        for (cpus, queues) in [(1, 1), (3, 3), (64, 8)] {
            let spec = GuestSpec { cpus, disk: Disk::vhost_user("/run/a,b/disk.sock"), ..spec() };
            let arguments: Vec<String> =
                spec.arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap()).collect();
            let has = |text: &str| arguments.iter().any(|a| a.contains(text));
            assert!(has("memory-backend-memfd,id=ram0,size=268435456,share=on,dump=off,merge=off"));
            assert!(has("dump-guest-core=off,mem-merge=off,memory-backend=ram0"));
            assert!(has("socket,id=disk-socket,path=/run/a,,b/disk.sock,reconnect=1"));
            assert!(has(&format!("chardev=disk-socket,id=disk0,bootindex=0,num-queues={queues}")));
            assert!(!has("nbd"));
        }
    }

    #[test]
    fn a_scratch_disk_is_the_last_one_and_boots_nothing() {
        for (disk, scratch, words) in [
            (
                Disk::vhost_user("/run/disk.sock"),
                Disk::vhost_user("/run/scratch.sock"),
                "vhost-user-blk-pci,chardev=scratch-socket,id=scratch0,num-queues=1",
            ),
            (
                Disk::nbd("/run/disk.sock", ""),
                Disk::nbd("/run/scratch.sock", ""),
                "virtio-blk-pci,drive=scratch0,id=scratch0,iothread=disk-thread,serial=headwater-scratch,discard=on,\
                 write-zeroes=on,werror=enospc,rerror=report",
            ),
        ] {
            let spec =
                GuestSpec { disk, scratch: Some(scratch), seed: Some("/run/seed.img".into()), ..spec() };
            let arguments: Vec<String> =
                spec.arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap()).collect();
            let at = |text: &str| arguments.iter().position(|a| a.contains(text)).unwrap();
            assert!(at("id=disk0") < at("headwater-seed") && at("headwater-seed") < at("id=scratch0"));
            assert_eq!(arguments[at("id=scratch0")], words);
            assert_eq!(arguments.iter().filter(|a| a.contains("bootindex")).count(), 1);
        }
    }

    /// QEMU rounds the memory size up, and needs a memory file of the rounded size.
    #[test]
    fn qemu_need_not_round_the_memory_size() {
        let spec = GuestSpec {
            memory_bytes: (256 << 20) + 9000,
            disk: Disk::vhost_user("/run/disk.sock"),
            ..spec()
        };
        let arguments: Vec<String> =
            spec.arguments(true, OLD).into_iter().map(|a| a.into_string().unwrap()).collect();
        let bytes = (256_u64 << 20) + 8192;
        assert!(arguments.iter().any(|a| a.contains(&format!("id=ram0,size={bytes},"))));
        assert!(arguments.contains(&format!("size={}k", bytes >> 10)));
    }

    #[test]
    fn the_reconnect_option_depends_on_the_qemu_version() {
        let spec = GuestSpec { disk: Disk::vhost_user("/run/disk.sock"), ..spec() };
        for (version, expected) in [
            (OLD, "socket,id=disk-socket,path=/run/disk.sock,reconnect=1"),
            (Version(9, 1), "socket,id=disk-socket,path=/run/disk.sock,reconnect=1"),
            (Version(9, 2), "socket,id=disk-socket,path=/run/disk.sock,reconnect-ms=1000"),
            (Version(10, 2), "socket,id=disk-socket,path=/run/disk.sock,reconnect-ms=1000"),
        ] {
            let arguments = spec.arguments(true, version);
            assert!(arguments.iter().any(|argument| argument == expected), "{version:?}: {arguments:?}");
        }
    }
}
