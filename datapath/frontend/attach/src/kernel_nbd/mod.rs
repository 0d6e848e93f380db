//! Attaches through the kernel's NBD client: after the NBD handshake, the socket is given to the kernel,
//! which makes `/dev/nbdN`.
//!
//! Another program may use the number of a device that has ended, and the kernel disconnects the device of a
//! number, whoever made that device. So each device gets a mark (`BACKEND_IDENTIFIER`, which the kernel shows
//! and compares since 5.14), which is checked before the device is disconnected.
//!
//! A device has one connection. If there are several, the kernel gives up a connection that has not answered
//! a request for 30 s and sends the request over the next one, until none is left. With a single connection
//! it waits, as reads of an image must while its store is unreachable.
//!
//! If a server dies, the kernel keeps requests for `DEAD_CONN_TIMEOUT`, and the next server gives it a new
//! socket (`RECONFIGURE`). Without that timeout the device fails at once, and its users get errors.

mod handshake;
mod netlink;

use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headwater_block::Geometry;
use rustix::io::Errno;

use self::netlink::{Attributes, Netlink, find};
use crate::Options;
use crate::error::{AttachError, System};
use crate::mark::{Mark, Owner};

// Commands and attributes of `linux/nbd-netlink.h`.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;
const DEAD_CONN_TIMEOUT: u16 = 8;
const BACKEND_IDENTIFIER: u16 = 10;

// Flags of an export (`linux/nbd.h`) that a volatile cache needs.
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;

/// A device of the kernel's NBD client.
pub(crate) struct KernelNbd {
    number: u32,
    mark: Mark,
    /// Whether this kernel reports the device's mark.
    is_marked: bool,
    is_stopped: AtomicBool,
    /// A copy of the kernel's descriptor, so that the order in which the two are closed does not matter.
    _socket: UnixStream,
}

/// Checks that the kernel has an NBD client that netlink reaches; the error says why not.
pub(crate) fn is_there() -> Result<(), String> {
    if !Path::new("/sys/block/nbd0").exists() {
        crate::load_module("nbd");
    }
    Netlink::open().map(drop).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "this kernel has no NBD client either (also after modprobe nbd)".into(),
        _ => format!("the kernel's NBD client cannot be reached: {error}"),
    })
}

impl KernelNbd {
    /// Connects a device, or gives a new socket to a device whose server died.
    pub(crate) fn start(geometry: &Geometry, options: &Options) -> Result<Self, AttachError> {
        let netlink = Netlink::open().system("reach the kernel's NBD client")?;
        let mut socket =
            UnixStream::connect(&options.nbd_socket).system("connect to the NBD server of this program")?;
        let export =
            handshake::shake_hands(&mut socket).system("negotiate with the NBD server of this program")?;
        if export.size_bytes != geometry.size_bytes {
            let source = std::io::Error::new(ErrorKind::InvalidData, "its disk has another size");
            return Err(AttachError::System { what: "use the NBD server of this program".into(), source });
        }
        // The server always offers flush; the kernel need not send flushes if the volume has no volatile
        // cache.
        let without = if geometry.volatile_cache { 0 } else { SEND_FLUSH | SEND_FUA };
        let flags = export.flags & !without;
        let fd = u32::try_from(socket.as_raw_fd()).unwrap_or(u32::MAX);
        let items = Attributes::default().nested(SOCKET_ITEM, &Attributes::default().u32(SOCKET_FD, fd));
        let mut attributes = Attributes::default();
        if let Some(number) = options.resume.or(options.number) {
            attributes = attributes.u32(INDEX, number);
        }
        attributes = attributes
            .u64(SIZE_BYTES, geometry.size_bytes)
            .u64(BLOCK_SIZE_BYTES, u64::from(geometry.logical_block_bytes))
            .u64(SERVER_FLAGS, u64::from(flags))
            .nested(SOCKETS, &items)
            .bytes(BACKEND_IDENTIFIER, format!("{}\0", options.mark.text()).as_bytes());
        if options.survives {
            attributes = attributes.u64(DEAD_CONN_TIMEOUT, options.dead_server_timeout_s);
        }
        let command = if options.resume.is_some() { RECONFIGURE } else { CONNECT };
        let answer = netlink.ask(command, &attributes).map_err(|error| match options.number {
            Some(number) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                AttachError::Taken { device: format!("/dev/nbd{number}") }
            }
            _ => AttachError::System {
                what: "connect a device of the kernel's NBD client".into(),
                source: error,
            },
        })?;
        let index = find(&answer, INDEX).and_then(<[u8]>::first_chunk).copied().map(u32::from_ne_bytes);
        let number = index.or(options.resume).or(options.number).unwrap_or(0);
        let (mark, is_stopped) = (options.mark, AtomicBool::new(false));
        let is_marked = owner(number, &mark) == Owner::Ours;
        Ok(Self { number, mark, is_marked, is_stopped, _socket: socket })
    }

    /// Number of the device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Whether the device was disconnected, by anyone.
    pub(crate) fn is_gone(&self) -> bool {
        match owner(self.number, &self.mark) {
            Owner::Ours | Owner::Unknown => false,
            Owner::Others => self.is_marked,
            Owner::Nobody => true,
        }
    }

    /// Disconnects the device. `false`: it may still be connected.
    pub(crate) fn stop(&self) -> bool {
        if self.is_stopped.swap(true, Ordering::SeqCst) {
            return true;
        }
        match owner(self.number, &self.mark) {
            // A device whose owner is unknown is not disconnected.
            Owner::Unknown => false,
            Owner::Others if self.is_marked => true,
            Owner::Ours | Owner::Others => remove(self.number),
            Owner::Nobody => true,
        }
    }
}

/// The owner of the device, with or without a living server.
pub(crate) fn owner(number: u32, mark: &Mark) -> Owner {
    owner_in(&Path::new("/sys/block").join(format!("nbd{number}")), mark)
}

/// Like [`owner`], from the files of the device's directory in sysfs.
fn owner_in(dir: &Path, mark: &Mark) -> Owner {
    let read = |name: &str| match std::fs::read_to_string(dir.join(name)) {
        Ok(text) => Ok(Some(text)),
        // The kernel removes the files when a device is disconnected, even while they are read.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    };
    let (Ok(pid), Ok(size), Ok(backend)) = (read("pid"), read("size"), read("backend")) else {
        return Owner::Unknown;
    };
    let is_connected = pid.is_some() || size.is_some_and(|size| size.trim() != "0");
    // A kernel that does not know marks reports at least which thread connected the device.
    let is_ours = match (backend, &pid) {
        (Some(backend), _) => backend.trim() == mark.text(),
        (None, Some(pid)) => pid.trim().parse() == Ok(mark.thread),
        (None, None) => false,
    };
    match (is_connected, is_ours) {
        (false, _) => Owner::Nobody,
        (true, true) => Owner::Ours,
        (true, false) => Owner::Others,
    }
}

/// Whether the kernel has the device connected, whoever owns it.
fn is_connected(number: u32) -> bool {
    let nobody = Mark { pid: 0, thread: 0, started: 0 };
    owner(number, &nobody) != Owner::Nobody
}

/// Disconnects a device, with or without a server, and waits up to 2 s for it. The caller has checked the
/// owner. `false`: the kernel refused.
pub(crate) fn remove(number: u32) -> bool {
    let asked = Netlink::open()
        .and_then(|netlink| netlink.ask(DISCONNECT, &Attributes::default().u32(INDEX, number)));
    if let Err(error) = asked
        && error.raw_os_error() != Some(Errno::INVAL.raw_os_error())
    {
        tracing::warn!("attach: cannot disconnect /dev/nbd{number}: {error}");
        return false;
    }
    for _ in 0..100 {
        if !is_connected(number) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_ours_by_its_mark_or_the_thread_that_connected_it() {
        let mark = Mark { pid: 10, thread: 12, started: 500 };
        let later = Mark { started: 501, ..mark };
        let (ours, theirs) = (mark.text() + "\n", later.text() + "\n");
        let cases: [(&[(&str, &str)], Owner); 12] = [
            (&[], Owner::Nobody),
            (&[("size", "0\n")], Owner::Nobody),
            (&[("size", "0\n"), ("backend", &ours)], Owner::Nobody),
            (&[("size", "8\n"), ("pid", "12\n"), ("backend", &ours)], Owner::Ours),
            // Another process serves it now.
            (&[("size", "8\n"), ("pid", "99\n"), ("backend", &ours)], Owner::Ours),
            (&[("size", "8\n"), ("backend", &ours)], Owner::Ours),
            (&[("size", "8\n"), ("pid", "12\n"), ("backend", &theirs)], Owner::Others),
            // Connected by a program that gave no mark, and whose thread has the same number as ours had.
            (&[("size", "8\n"), ("pid", "12\n"), ("backend", "\n")], Owner::Others),
            // Kernels without marks.
            (&[("size", "8\n"), ("pid", "12\n")], Owner::Ours),
            (&[("size", "8\n"), ("pid", "13\n")], Owner::Others),
            (&[("size", "8\n"), ("pid", "?\n")], Owner::Others),
            (&[("size", "8\n")], Owner::Others),
        ];
        for (files, expected) in cases {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                std::fs::write(dir.path().join(name), text).unwrap();
            }
            assert_eq!(owner_in(dir.path(), &mark), expected, "{files:?}");
        }
    }

    #[test]
    fn a_device_whose_files_cannot_be_read_is_unknown() {
        let mark = Mark { pid: 10, thread: 12, started: 500 };
        for unreadable in ["pid", "size", "backend"] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("size"), "8\n").unwrap();
            let _ = std::fs::remove_file(dir.path().join(unreadable));
            // Reading a directory as a file fails with another error than a missing file.
            std::fs::create_dir(dir.path().join(unreadable)).unwrap();
            assert_eq!(owner_in(dir.path(), &mark), Owner::Unknown, "{unreadable}");
        }
    }
}
