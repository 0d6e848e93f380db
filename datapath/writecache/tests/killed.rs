//! Kills a process with a write cache in a file at random instants, while several threads write and segments
//! are spilled, packed, cleaned and frozen. The next process must find each answered write.
//!
//! The process records in another file, before and after each write, which writes began and which were
//! answered.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use headwater_testkit::Rng;
use headwater_testkit::rounds::is_long;
use headwater_writecache::{
    Admission, BlockNumber, Buffering, CacheOptions, DEFAULT_WEIGHT, Fetched, FetchedOld, Found, Handover,
    Host, LittleSpace, Location, Old, OverflowOptions, Ticket, UnloggedBlocks, WriteCache, WriteResult,
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const SECTORS: usize = 8;
const BLOCKS: u32 = 6000;
const MIB: u64 = 1 << 20;

/// Threads that write; each has blocks of its own.
const WRITERS: u32 = 3;

/// For the child: the directory of its overflow, and its seed.
const CHILD: &str = "HEADWATER_KILLED_CHILD";

fn options(at: &Path) -> CacheOptions {
    CacheOptions {
        name: "killed".into(),
        size_bytes: u64::from(BLOCKS) * BLOCK as u64,
        ram_bytes: 24 * MIB,
        weight: DEFAULT_WEIGHT,
        overflow: Some(OverflowOptions {
            at: at.to_owned(),
            limit_bytes: 48 * MIB,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        }),
        pause_limit: Duration::from_secs(60),
        persistent: None,
        base: None,
    }
}

/// The contents of a sector in a version. Some are zero, and some equal the image, which is version 0.
fn sector(block: u32, sector: usize, version: u32) -> [u8; SECTOR] {
    let version = if version % 7 == 5 { 0 } else { version };
    if version % 7 == 3 {
        return [0; SECTOR];
    }
    let mut bytes = [0; SECTOR];
    let first = (u64::from(version) << 32) | (u64::from(block) << 8) | (sector as u64 + 1);
    let mut rng = Rng::new(first);
    for word in bytes.chunks_mut(8) {
        let word_is = if version.is_multiple_of(3) { rng.next_u64() } else { first };
        word.copy_from_slice(&word_is.to_le_bytes());
    }
    bytes
}

fn data(block: u32, first: usize, versions: &[u32]) -> Vec<u8> {
    (first..).zip(versions).flat_map(|(at, version)| sector(block, at, *version)).collect()
}

/// For each sector, the version whose write began last, and the version that was answered last.
struct Notes(File);

#[derive(Clone, Copy)]
enum Which {
    Begun,
    Answered,
}

impl Notes {
    const BYTES: usize = SECTORS * 4;

    fn at(block: u32, which: Which) -> u64 {
        let region = match which {
            Which::Begun => 0,
            Which::Answered => u64::from(BLOCKS),
        };
        (region + u64::from(block)) * Self::BYTES as u64
    }

    fn get(&self, block: u32, which: Which) -> [u32; SECTORS] {
        let mut bytes = [0; Self::BYTES];
        self.0.read_exact_at(&mut bytes, Self::at(block, which)).unwrap();
        std::array::from_fn(|at| u32::from_le_bytes(bytes[at * 4..][..4].try_into().unwrap()))
    }

    fn put(&self, block: u32, which: Which, versions: &[u32; SECTORS]) {
        let bytes: Vec<u8> = versions.iter().flat_map(|version| version.to_le_bytes()).collect();
        self.0.write_all_at(&bytes, Self::at(block, which)).unwrap();
    }
}

fn send(socket: &UnixStream, fds: &[OwnedFd]) {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    rustix::net::sendmsg(socket, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).unwrap();
}

/// The received descriptors; none if the other side has closed.
fn receive(socket: &UnixStream) -> Vec<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let read = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    );
    let mut fds = Vec::new();
    if read.is_ok_and(|read| read.bytes == 1) {
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
    }
    fds
}

fn parts_of(handover: Handover) -> Vec<OwnedFd> {
    [Some(handover.memory), handover.overflow, handover.key].into_iter().flatten().collect()
}

fn handover(mut parts: Vec<OwnedFd>) -> Handover {
    let key = if parts.len() == 3 { parts.pop() } else { None };
    let overflow = parts.pop();
    Handover { memory: parts.pop().unwrap(), overflow, key }
}

/// A user of a cache.
struct Client {
    cache: Arc<WriteCache>,
    notes: Arc<Notes>,
}

impl Client {
    fn fetch(&self, ticket: Ticket) -> Option<Vec<u8>> {
        let (tell, told) = mpsc::channel();
        self.cache.fetch(vec![ticket], move |_, fetched| {
            let answer = match fetched {
                Fetched::Data(data) => Ok(Some(data.to_vec())),
                Fetched::Moved => Ok(None),
                Fetched::Failed(error) => Err(error.to_string()),
            };
            let _ = tell.send(answer);
        });
        told.recv().unwrap().unwrap()
    }

    fn read(&self, block: u32) -> Vec<u8> {
        let number = BlockNumber(block);
        let image = data(block, 0, &[0; SECTORS]);
        loop {
            let mut into = vec![0; BLOCK];
            let mut places = Vec::new();
            match self.cache.read(number, 0, &mut into) {
                Found::Partial => {
                    self.cache.read_parts(number, 0, &mut into, &mut |at, len, found| {
                        places.push((at, len, found))
                    });
                }
                found => places.push((0, BLOCK, found)),
            }
            let mut has_moved = false;
            for (at, len, found) in places {
                match found {
                    Found::Done(_) => {}
                    Found::Absent => into[at..at + len].copy_from_slice(&image[at..at + len]),
                    Found::Spilled(ticket) => match self.fetch(ticket) {
                        Some(slot) => into[at..at + len].copy_from_slice(&slot[at..at + len]),
                        None => has_moved = true,
                    },
                    Found::Partial => has_moved = true,
                }
            }
            if !has_moved {
                return into;
            }
        }
    }

    fn store(&self, block: u32, mut write: impl FnMut(&[FetchedOld]) -> WriteResult) {
        let mut fetched: Vec<FetchedOld> = Vec::new();
        loop {
            match write(&fetched) {
                WriteResult::Done => return,
                WriteResult::NeedOld(old @ Old::Absent) => {
                    fetched.push((old, data(block, 0, &[0; SECTORS])));
                }
                WriteResult::NeedOld(old @ Old::Spilled(ticket)) => {
                    fetched.extend(self.fetch(ticket).map(|slot| (old, slot)));
                }
                WriteResult::NoRoom | WriteResult::Queued | WriteResult::Throttled => {
                    if !self.cache.make_room() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                WriteResult::Closed => panic!("the cache is closed"),
            }
        }
    }

    /// Writes some sectors of a block that belongs to this thread.
    fn write(&self, block: u32, rng: &mut Rng) {
        let before = self.notes.get(block, Which::Begun);
        let next = before.iter().max().unwrap() + 1;
        let number = BlockNumber(block);
        let (first, end) = if rng.chance(1, 3) {
            let first = rng.index(SECTORS);
            (first, first + 1 + rng.index(SECTORS - first))
        } else {
            (0, SECTORS)
        };
        let mut after = before;
        after[first..end].fill(next);
        self.notes.put(block, Which::Begun, &after);
        let bytes = data(block, first, &after[first..end]);
        if first == 0 && end == SECTORS && next % 7 == 3 {
            self.cache.clear(number, BlockNumber(block + 1), Location::ZERO, UnloggedBlocks::Stay);
        } else if first == 0 && end == SECTORS {
            let same = next % 7 == 5;
            self.store(block, |_| self.cache.write_unless(number, &bytes, Admission::Rest, |_| same));
        } else {
            self.store(block, |fetched| match fetched {
                [] => self.cache.write_part(number, first * SECTOR, &bytes, Admission::Rest, || false),
                fetched => self.cache.merge(number, first * SECTOR, &bytes, fetched, Admission::Rest),
            });
        }
        self.notes.put(block, Which::Answered, &after);
    }

    /// Checks that all blocks have the answered contents, or those of a write that was in flight.
    fn check(&self, kill: u64) {
        for block in 0..BLOCKS {
            let (begun, answered) =
                (self.notes.get(block, Which::Begun), self.notes.get(block, Which::Answered));
            let found = self.read(block);
            if begun == answered && found == data(block, 0, &answered) {
                continue;
            }
            for at in 0..SECTORS {
                let found = &found[at * SECTOR..][..SECTOR];
                let (old, new) = (sector(block, at, answered[at]), sector(block, at, begun[at]));
                let wrong = (0..SECTOR).find(|byte| found[*byte] != old[*byte] && found[*byte] != new[*byte]);
                assert_eq!(
                    wrong,
                    None,
                    "kill {kill}: sector {at} of block {block}, answered {}, begun {}, begins with {:x?}",
                    answered[at],
                    begun[at],
                    &found[..16]
                );
            }
            if begun != answered {
                // The write is not repeated: one more write makes the contents known again.
                let next = begun.iter().max().unwrap() + 7 - begun.iter().max().unwrap() % 7 + 1;
                let after = [next; SECTORS];
                self.notes.put(block, Which::Begun, &after);
                let bytes = data(block, 0, &after);
                self.store(block, |_| self.cache.write(BlockNumber(block), &bytes, Admission::Rest));
                self.notes.put(block, Which::Answered, &after);
            }
        }
    }
}

/// The work of the child until it is killed.
#[test]
fn child_that_is_killed() {
    let Some(how) = std::env::var_os(CHILD) else { return };
    let how = how.into_string().unwrap();
    let (seed, at) = how.split_once(' ').unwrap();
    let (mut rng, at) = (Rng::new(seed.parse().unwrap()), PathBuf::from(at));
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let host = Host::start(u64::MAX).unwrap();
    let mut fds = receive(&socket);
    let notes = Arc::new(Notes(File::from(fds.remove(0))));
    let options = options(&at);
    let cache = if fds.len() == 1 {
        let cache = WriteCache::open_in(File::from(fds.remove(0)), &options, &host.shared()).unwrap();
        send(&socket, &parts_of(cache.handover().unwrap().unwrap()));
        cache
    } else {
        let cache = WriteCache::recover(handover(fds), &options, &host.shared()).unwrap();
        send(&socket, &parts_of(cache.handover().unwrap().unwrap()));
        cache
    };
    let writes = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let client = Client { cache: Arc::clone(&cache), notes: Arc::clone(&notes) };
            let (mut rng, writes) = (rng.fork(), Arc::clone(&writes));
            std::thread::spawn(move || {
                loop {
                    let block = rng.below(u64::from(BLOCKS / WRITERS)) as u32 * WRITERS + writer;
                    // Some blocks are written much more often than others.
                    let block = if rng.chance(1, 2) { block % (64 * WRITERS) } else { block };
                    if block % WRITERS == writer && block < BLOCKS {
                        client.write(block, &mut rng);
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    loop {
        let view = cache.freeze().unwrap();
        std::thread::sleep(Duration::from_millis(1 + rng.below(20)));
        cache.set_ram_bytes((20 + rng.below(8)) * MIB);
        drop(view);
        assert!(threads.iter().all(|thread| !thread.is_finished()), "a writer has ended");
        std::thread::sleep(Duration::from_millis(rng.below(5)));
    }
}

fn start(seed: u64, at: &Path) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_that_is_killed", "--nocapture"]);
    command.env(CHILD, format!("{seed} {}", at.display()));
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
    (command.spawn().unwrap(), ours)
}

#[test]
fn what_was_answered_outlives_a_process_that_is_killed() {
    let kills = if is_long() { 1000 } else { 30 };
    let dir = tempfile::tempdir().unwrap();
    let memfd = |name: &str| rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let notes = File::from(memfd("notes"));
    notes.set_len(2 * u64::from(BLOCKS) * Notes::BYTES as u64).unwrap();
    let notes = Arc::new(Notes(notes));
    let mut rng = Rng::new(1);
    let mut left: Option<Vec<OwnedFd>> = None;
    let copy = |fds: &[OwnedFd]| -> Vec<OwnedFd> { fds.iter().map(|fd| fd.try_clone().unwrap()).collect() };
    let (mut spilled, mut packed) = (0, 0);
    // On a busy computer a process may do little before it is killed: then there are more rounds.
    for kill in 0..10 * kills {
        if kill >= kills && spilled > 0 && packed > 0 {
            break;
        }
        let (mut child, socket) = start(rng.next_u64(), dir.path());
        let mut fds = vec![OwnedFd::from(notes.0.try_clone().unwrap())];
        match &left {
            None => fds.push(memfd("cache")),
            Some(left) => fds.extend(copy(left)),
        }
        send(&socket, &fds);
        // Some are killed while they recover: the next one must find the state that they took over.
        let waits = left.is_none() || rng.chance(7, 8);
        if waits {
            let handed = receive(&socket);
            assert!(handed.len() >= 2, "kill {kill}: the child cannot open the cache");
            left = Some(handed);
        }
        let most_us = if rng.chance(1, 4) { 2_000 } else { 200_000 };
        std::thread::sleep(Duration::from_micros(rng.below(most_us)));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "kill {kill}: the child ended by itself");
        let host = Host::start(u64::MAX).unwrap();
        let parts = copy(left.as_ref().unwrap());
        let cache = WriteCache::recover(handover(parts), &options(dir.path()), &host.shared())
            .unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        let client = Client { cache, notes: Arc::clone(&notes) };
        client.check(kill);
        let now = client.cache.snapshot();
        assert_eq!((now.corrupt_blocks, now.disk_errors), (0, 0), "kill {kill}: {now:?}");
        spilled += now.disk_used_bytes;
        packed += now.packed_bytes;
        if (kill + 1) % 100 == 0 {
            println!("{} kills", kill + 1);
        }
    }
    assert!(spilled > 0 && packed > 0, "nothing was on disk, or packed");
}
