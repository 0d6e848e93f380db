//! The kernel's NBD client: a socket over which hands have been shaken is given to it, and it makes `/dev/nbdN`.
//!
//! Anybody may have connected the number of a device that is gone, and the kernel disconnects whatever is asked for: so each device is
//! given a mark (`BACKEND_IDENTIFIER`, which the kernel shows and compares since 5.14), and looked at before.
//!
//! It has one connection. Of several the kernel gives each up that has not answered a request for 30 s, and sends it over the next, until
//! none is left; with one alone it waits, as reads of an image must while its server is away.
//!
//! When a server dies the kernel keeps requests for the time that it was told (`DEAD_CONN_TIMEOUT`), and the next server gives it a new
//! socket (`RECONFIGURE`). Without such a time the device is cut, and its users get errors.

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

// Of the flags of an export (`linux/nbd.h`): what a volatile cache needs.
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;

/// A device of the kernel's NBD client.
pub(crate) struct KernelNbd {
    number: u32,
    mark: Mark,
    /// Whether this kernel tells whose the device is.
    is_marked: bool,
    is_stopped: AtomicBool,
    /// The kernel has a descriptor of its own; this keeps a copy open, so that nothing depends on whose is closed first.
    _socket: UnixStream,
}

/// Whether the kernel has an NBD client that netlink reaches; else why not.
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
    /// Connects a device, or gives a new socket to one whose server died.
    pub(crate) fn start(geometry: &Geometry, options: &Options) -> Result<Self, AttachError> {
        let netlink = Netlink::open().system("reach the kernel's NBD client")?;
        let mut socket =
            UnixStream::connect(&options.nbd_socket).system("connect to the NBD server of this program")?;
        let export =
            handshake::shake_hands(&mut socket).system("shake hands with the NBD server of this program")?;
        if export.size_bytes != geometry.size_bytes {
            let source = std::io::Error::new(ErrorKind::InvalidData, "its disk has another size");
            return Err(AttachError::System { what: "use the NBD server of this program".into(), source });
        }
        // The server offers to flush whatever it serves; the kernel need not ask where nothing would come of it.
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
        let told = find(&answer, INDEX).and_then(<[u8]>::first_chunk).copied().map(u32::from_ne_bytes);
        let number = told.or(options.resume).or(options.number).unwrap_or(0);
        let (mark, is_stopped) = (options.mark, AtomicBool::new(false));
        let is_marked = owner(number, &mark) == Owner::Ours;
        Ok(Self { number, mark, is_marked, is_stopped, _socket: socket })
    }

    /// Number of the device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Whether somebody disconnected it.
    pub(crate) fn is_gone(&self) -> bool {
        match owner(self.number, &self.mark) {
            Owner::Ours | Owner::Unknown => false,
            Owner::Others => self.is_marked,
            Owner::Nobody => true,
        }
    }

    /// Disconnects it. `false`: it may still be connected.
    pub(crate) fn stop(&self) -> bool {
        if self.is_stopped.swap(true, Ordering::SeqCst) {
            return true;
        }
        match owner(self.number, &self.mark) {
            // What cannot be told is not cut.
            Owner::Unknown => false,
            Owner::Others if self.is_marked => true,
            Owner::Ours | Owner::Others => remove(self.number),
            Owner::Nobody => true,
        }
    }
}

/// Whose the device is, with or without a living server.
pub(crate) fn owner(number: u32, mark: &Mark) -> Owner {
    owner_in(&Path::new("/sys/block").join(format!("nbd{number}")), mark)
}

/// The same, as the files of its directory say.
fn owner_in(dir: &Path, mark: &Mark) -> Owner {
    let read = |name: &str| match std::fs::read_to_string(dir.join(name)) {
        Ok(text) => Ok(Some(text)),
        // The kernel removes them when a device is disconnected, also while they are read.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    };
    let (Ok(pid), Ok(size), Ok(backend)) = (read("pid"), read("size"), read("backend")) else {
        return Owner::Unknown;
    };
    let is_connected = pid.is_some() || size.is_some_and(|size| size.trim() != "0");
    // Where the kernel does not know the mark it tells at least which thread connected the device.
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

/// Whether the kernel has the device connected, whosever it is.
fn is_connected(number: u32) -> bool {
    let nobody = Mark { pid: 0, thread: 0, started: 0 };
    owner(number, &nobody) != Owner::Nobody
}

/// Disconnects a device, with or without a server, and waits a moment for it. The caller has looked whose it is. `false`: the kernel
/// did not take the order.
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
            // Another process went on with it.
            (&[("size", "8\n"), ("pid", "99\n"), ("backend", &ours)], Owner::Ours),
            (&[("size", "8\n"), ("backend", &ours)], Owner::Ours),
            (&[("size", "8\n"), ("pid", "12\n"), ("backend", &theirs)], Owner::Others),
            // Connected by somebody who gave no mark, with the number of a thread that was ours.
            (&[("size", "8\n"), ("pid", "12\n"), ("backend", "\n")], Owner::Others),
            // Kernels that know no marks.
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
            // Reading a directory as a file is an error of another kind than its absence.
            std::fs::create_dir(dir.path().join(unreadable)).unwrap();
            assert_eq!(owner_in(dir.path(), &mark), Owner::Unknown, "{unreadable}");
        }
    }
}
