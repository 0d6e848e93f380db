//! What outlives the disk process: descriptors under names, which the keeper ([`super::keeper`]) holds. This file has both ends'
//! messages, and [`Keeper`], the disk process's side: it gives the keeper each disk, and reads at its start what the keeper holds.
//!
//! Messages go over a socket that preserves their boundaries: a byte that says what to do, and a name. The disk process sends a
//! descriptor before it uses the file behind it. A message that was sent counts, even if its sender has ended by then.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::Context;
use headwater_service::backend::DiskRequest;
use headwater_writecache::Handover;
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::unix::AsyncFd;
use uuid::Uuid;

/// The lock of the disks of a data directory.
pub(super) const LOCK: &str = "lock";
/// The socket on which daemons call.
pub(super) const LISTENER: &str = "listener";
/// The settings of the first daemon.
pub(super) const SETTINGS: &str = "settings";
/// A directory for files with the memory of write caches.
pub(super) const MEMORY: &str = "memory";

/// A program that a user gives the keeper.
pub(super) const PROGRAM: &str = "program";

/// How a disk was opened, after its machine's UUID. Without this part there is no disk.
const REQUEST: &str = "request";
/// The parts of the write cache of a disk, and of that of a scratch disk.
const DISK: [&str; 3] = ["cache", "overflow", "key"];
const SCRATCH: [&str; 3] = ["scratch-cache", "scratch-overflow", "scratch-key"];

/// The longest name or text, in bytes.
const MAX_NAME_BYTES: usize = 1024;

/// A message between the keeper and the disk process, or between the keeper and `headwater upgrade`.
pub(super) enum Message<F> {
    /// Hold this descriptor under this name, instead of what has the name now.
    Put(String, F),
    /// Hold no longer what has this name.
    Remove(String),
    /// To the disk process: that was all that the keeper holds.
    All,
    /// To the keeper: from now on the disk of this machine's UUID is taken over. Empty: none is.
    TakesOver(String),
    /// To the keeper: all disks are taken over, and daemons are served.
    Serves,
    /// To the keeper: why the disks are not handed over. They are served as before.
    Refuses(String),
    /// To a user: the new program serves the disks.
    Done(String),
    /// To a user: the old program serves them.
    Failed(String),
}

/// Whether a name is the one of a disk's request: the disk is complete.
pub(super) fn is_request(name: &str) -> bool {
    name.ends_with(REQUEST)
}

/// Whether a name is the one of a part of this machine's disk.
pub(super) fn is_of(name: &str, uuid: &str) -> bool {
    name.strip_prefix(uuid).is_some_and(|part| part.starts_with(' '))
}

fn name_of(uuid: Uuid, part: &str) -> String {
    format!("{uuid} {part}")
}

/// A descriptor that the runtime waits for.
#[expect(
    deprecated,
    reason = "its successor is unsafe, because of types that close their descriptor early; an `OwnedFd` does not"
)]
pub(super) fn watched(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// Sends a message.
pub(super) fn send(socket: BorrowedFd<'_>, message: &Message<impl AsFd>) -> std::io::Result<()> {
    let (what, name, fd) = match message {
        Message::Put(name, fd) => (b"+", &**name, Some(fd.as_fd())),
        Message::Remove(name) => (b"-", &**name, None),
        Message::All => (b".", "", None),
        Message::TakesOver(uuid) => (b"!", &**uuid, None),
        Message::Serves => (b"=", "", None),
        Message::Refuses(why) => (b"?", cut(why), None),
        Message::Done(text) => (b"y", cut(text), None),
        Message::Failed(text) => (b"n", cut(text), None),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let bytes = [IoSlice::new(what), IoSlice::new(name.as_bytes())];
    rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// As much of a text as a message has space for.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_NAME_BYTES)).rev().find(|at| text.is_char_boundary(*at));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// Receives a message. `None`: the other end is closed.
pub(super) fn receive(socket: BorrowedFd<'_>) -> std::io::Result<Option<Message<OwnedFd>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 1 + MAX_NAME_BYTES];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    let strange = || std::io::Error::new(ErrorKind::InvalidData, "a message that the keeper does not know");
    let Some((what, name)) = bytes.get(..received.bytes).and_then(<[u8]>::split_first) else {
        return Ok(None);
    };
    let name = String::from_utf8(name.to_vec()).map_err(|_| strange())?;
    match (what, fd) {
        (b'+', Some(fd)) => Ok(Some(Message::Put(name, fd))),
        (b'-', None) => Ok(Some(Message::Remove(name))),
        (b'.', None) => Ok(Some(Message::All)),
        (b'!', None) => Ok(Some(Message::TakesOver(name))),
        (b'=', None) => Ok(Some(Message::Serves)),
        (b'?', None) => Ok(Some(Message::Refuses(name))),
        (b'y', None) => Ok(Some(Message::Done(name))),
        (b'n', None) => Ok(Some(Message::Failed(name))),
        _ => Err(strange()),
    }
}

/// A file of memory with a value.
fn written(name: &str, value: &impl Serialize) -> anyhow::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(value)?)?;
    Ok(file)
}

fn read<T: DeserializeOwned>(fd: OwnedFd) -> anyhow::Result<T> {
    let mut file = File::from(fd);
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// A disk that an earlier disk process served, as the keeper held it.
pub struct LeftDisk {
    /// How the disk was opened, with its last limits.
    pub request: DiskRequest,
    /// What is in its write caches.
    pub caches: LeftCaches,
}

/// The memory of the write caches of a machine.
#[derive(Default)]
pub struct LeftCaches {
    /// That of its disk, unless that is persistent.
    pub disk: Option<Handover>,
    /// That of its scratch disk, if it has one.
    pub scratch: Option<Handover>,
}

/// What the keeper held when this process started.
pub(super) struct Handed(BTreeMap<String, OwnedFd>);

impl Handed {
    pub(super) fn take(&mut self, name: &str) -> Option<OwnedFd> {
        self.0.remove(name)
    }

    /// The settings of the first daemon, if there was one.
    pub(super) fn settings<T: DeserializeOwned>(&mut self) -> anyhow::Result<Option<T>> {
        let settings = self.take(SETTINGS).map(read).transpose();
        settings.context("cannot read the settings that the keeper has")
    }

    /// The disks of the process before this one, with the reason of each that cannot be used.
    pub(super) fn disks(mut self) -> Vec<(Uuid, anyhow::Result<LeftDisk>)> {
        let uuids: BTreeSet<Uuid> =
            self.0.keys().filter_map(|name| name.split(' ').next()?.parse().ok()).collect();
        uuids.into_iter().map(|uuid| (uuid, self.disk(uuid))).collect()
    }

    fn disk(&mut self, uuid: Uuid) -> anyhow::Result<LeftDisk> {
        let request = self.take(&name_of(uuid, REQUEST));
        let [disk, scratch] = [DISK, SCRATCH].map(|parts| {
            let [memory, overflow, key] = parts.map(|part| self.take(&name_of(uuid, part)));
            memory.map(|memory| Handover { memory, overflow, key })
        });
        let incomplete = "its process ended while it was opened";
        let request: DiskRequest = read(request.context(incomplete)?)?;
        // A persistent disk is in its files: its process has saved it before it handed it over.
        anyhow::ensure!(disk.is_some() || request.kept.is_some(), incomplete);
        Ok(LeftDisk { request, caches: LeftCaches { disk, scratch } })
    }
}

/// The disk process's connection to its keeper.
pub struct Keeper {
    socket: OwnedFd,
    memory: Option<OwnedFd>,
}

impl Keeper {
    /// The keeper that started this process, and what it holds.
    pub(super) fn connect() -> anyhow::Result<(Self, Handed)> {
        let failed = "no keeper has started this process: 'headwater disks' does that by itself";
        let socket = std::io::stdin().as_fd().try_clone_to_owned().context(failed)?;
        let mut handed = BTreeMap::new();
        loop {
            match receive(socket.as_fd()).context(failed)?.context(failed)? {
                Message::Put(name, fd) => drop(handed.insert(name, fd)),
                Message::All => break,
                // The others are for the keeper and for users.
                _ => {}
            }
        }
        let memory = handed.remove(MEMORY);
        Ok((Self { socket, memory }, Handed(handed)))
    }

    pub(super) fn put(&self, name: &str, fd: impl AsFd) -> std::io::Result<()> {
        send(self.socket.as_fd(), &Message::Put(name.to_owned(), fd.as_fd()))
    }

    pub(super) fn put_settings(&self, settings: &impl Serialize) -> anyhow::Result<()> {
        self.put(SETTINGS, written("headwater-settings", settings)?).context("the keeper has ended")
    }

    /// A new file for the memory of a write cache. `None`: the sizes of files are limited, and the file is sparse and long.
    pub fn memory_file(&self) -> std::io::Result<Option<File>> {
        if let Some(limit_bytes) = getrlimit(Resource::Fsize).current {
            tracing::warn!(
                limit_bytes,
                "a machine does not outlive a crash of the disk process, because the sizes of files are limited (ulimit -f, LimitFSIZE=)"
            );
            return Ok(None);
        }
        if let Some(directory) = &self.memory {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            match rustix::fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => return Ok(Some(file.into())),
                Err(error) => tracing::debug!(%error, "no file in the tmpfs of write caches"),
            }
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
        let made = rustix::fs::memfd_create("headwater-cache", flags);
        // Linux before 6.3 does not know the flag.
        let made = made.or_else(|_| rustix::fs::memfd_create("headwater-cache", MemfdFlags::CLOEXEC))?;
        Ok(Some(made.into()))
    }

    /// Gives the keeper a disk, before the disk is used.
    pub fn put_disk(&self, request: &DiskRequest, caches: &LeftCaches) -> anyhow::Result<()> {
        let uuid = request.uuid;
        // Nothing of an earlier disk of the machine may remain.
        self.forget(uuid)?;
        for (cache, parts) in [(&caches.disk, DISK), (&caches.scratch, SCRATCH)] {
            let Some(Handover { memory, overflow, key }) = cache else { continue };
            for (part, fd) in parts.into_iter().zip([Some(memory), overflow.as_ref(), key.as_ref()]) {
                if let Some(fd) = fd {
                    self.put(&name_of(uuid, part), fd)?;
                }
            }
        }
        self.put_request(request)
    }

    /// Gives the keeper the request with which a disk was opened. From then on the next disk process can take the disk over.
    pub fn put_request(&self, request: &DiskRequest) -> anyhow::Result<()> {
        self.put(&name_of(request.uuid, REQUEST), written("headwater-request", request)?)?;
        Ok(())
    }

    /// Has the keeper forget a disk.
    pub fn forget(&self, uuid: Uuid) -> std::io::Result<()> {
        // The request first: without that the rest is nothing.
        [REQUEST]
            .into_iter()
            .chain(DISK)
            .chain(SCRATCH)
            .try_for_each(|part| send(self.socket.as_fd(), &Message::<&OwnedFd>::Remove(name_of(uuid, part))))
    }

    /// All disks are taken over. A keeper that waits for this ends an upgrade.
    pub(super) fn serves(&self) -> std::io::Result<()> {
        send(self.socket.as_fd(), &Message::<&OwnedFd>::Serves)
    }

    /// The disks are not handed over, and an upgrade is refused.
    pub(super) fn refuses(&self, why: String) -> std::io::Result<()> {
        send(self.socket.as_fd(), &Message::<&OwnedFd>::Refuses(why))
    }

    /// Begins or ends to take a disk over: if this process crashes meanwhile, that is held against the disk.
    pub(super) fn takes_over(&self, uuid: Option<Uuid>) -> std::io::Result<()> {
        let uuid = uuid.map(|uuid| uuid.to_string()).unwrap_or_default();
        send(self.socket.as_fd(), &Message::<&OwnedFd>::TakesOver(uuid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_with_their_descriptors() {
        let (here, there) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let file = written("x", &7_u32).unwrap();
        let uuid = Uuid::from_u128(5);
        send(here.as_fd(), &Message::Put(name_of(uuid, REQUEST), &file)).unwrap();
        send(here.as_fd(), &Message::<&File>::Remove(name_of(uuid, SCRATCH[2]))).unwrap();
        send(here.as_fd(), &Message::<&File>::All).unwrap();
        // They count although their sender has ended.
        drop((here, file));
        match receive(there.as_fd()).unwrap() {
            Some(Message::Put(name, fd)) => {
                assert!(is_request(&name) && is_of(&name, &uuid.to_string()));
                assert_eq!(read::<u32>(fd).unwrap(), 7);
            }
            _ => panic!("no descriptor"),
        }
        assert!(matches!(receive(there.as_fd()).unwrap(), Some(Message::Remove(name)) if !is_request(&name)));
        assert!(matches!(receive(there.as_fd()).unwrap(), Some(Message::All)));
        assert!(receive(there.as_fd()).unwrap().is_none());
    }
}
