//! Memory for keys: never swapped, left out of core dumps, and wiped when it is freed.
//!
//! A page is of the first of these kinds that the system allows, and is divided into slots of [`SLOT_BYTES`]:
//!
//! 1. `memfd_secret`: the kernel does not map it, so neither a debugger nor a dump of the kernel shows it,
//!    and a host does not hibernate while it is in use;
//! 2. `mlock`: it stays in RAM;
//! 3. neither: it may reach swap. That is logged once, with advice, and [`KeySlot::protection`] reports it.
//!
//! In each case the page is left out of core dumps and not inherited by child processes. The first two kinds
//! count against `RLIMIT_MEMLOCK`: 4 KiB for four keys.
//!
//! `unsafe` here: mapping memory, and handing out parts of it. Each slot has one owner, kept by [`Arena`].
#![expect(unsafe_code, reason = "memory is mapped and divided; see above")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes of a slot: an expanded AES key with its hash key, and the key itself while that is expanded.
pub const SLOT_BYTES: usize = 1024;

const PAGE_BYTES: usize = 4096;
const SLOTS_PER_PAGE: usize = PAGE_BYTES / SLOT_BYTES;

/// How well a key is protected from swap and dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// In memory that only this process can access.
    Secret,
    /// In memory that is never swapped.
    Locked,
    /// Only left out of core dumps: the system refused to lock the memory.
    Unlocked,
}

impl Protection {
    /// Its name in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Protection::Secret => "secret",
            Protection::Locked => "locked",
            Protection::Unlocked => "unlocked",
        }
    }
}

struct Page {
    start: NonNull<u8>,
    protection: Protection,
    used: [bool; SLOTS_PER_PAGE],
}

// SAFETY: plain memory; `used` says who may access which part of it.
unsafe impl Send for Page {}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no slot is in use.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), PAGE_BYTES) };
    }
}

/// Pages with slots for keys.
pub struct Arena {
    pages: Mutex<Vec<Page>>,
    /// The kinds of memory that are tried, in order.
    methods: &'static [Protection],
}

/// The keys of this process.
static KEYS: Arena = Arena::new(&[Protection::Secret, Protection::Locked]);

impl Arena {
    const fn new(methods: &'static [Protection]) -> Self {
        Self { pages: Mutex::new(Vec::new()), methods }
    }

    fn take(&'static self) -> io::Result<KeySlot> {
        let mut pages = self.pages.lock();
        if !pages.iter().any(|page| page.used.contains(&false)) {
            pages.push(map_page(self.methods)?);
        }
        for page in pages.iter_mut() {
            let Some(index) = page.used.iter().position(|used| !used) else { continue };
            if let Some(used) = page.used.get_mut(index) {
                *used = true;
            }
            // SAFETY: `index` is below the slots of a page, so this is inside the mapping.
            let start = unsafe { page.start.add(index * SLOT_BYTES) };
            return Ok(KeySlot { arena: self, start, protection: page.protection });
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }

    fn give(&self, start: NonNull<u8>) {
        let mut pages = self.pages.lock();
        for page in pages.iter_mut() {
            let offset = start.addr().get().wrapping_sub(page.start.addr().get());
            if let Some(used) = page.used.get_mut(offset / SLOT_BYTES) {
                *used = false;
            }
        }
        pages.retain(|page| page.used.contains(&true));
    }
}

/// One key's memory, zeroed when it is taken and when it is dropped.
pub struct KeySlot {
    arena: &'static Arena,
    start: NonNull<u8>,
    protection: Protection,
}

// SAFETY: the slot's bytes belong to this value alone.
unsafe impl Send for KeySlot {}
// SAFETY: a shared reference gives out the address only; what is done with it is for the user to justify.
unsafe impl Sync for KeySlot {}

impl KeySlot {
    /// Takes a slot of [`SLOT_BYTES`], with the same alignment.
    pub fn take() -> io::Result<Self> {
        KEYS.take()
    }

    /// The address of the slot.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How well the slot is protected.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Overwrites `len` bytes from `from` on with zeroes; the compiler cannot omit that.
    pub fn wipe(&mut self, from: usize, len: usize) {
        for offset in from..from.saturating_add(len).min(SLOT_BYTES) {
            // SAFETY: inside the slot, which is ours.
            unsafe { self.start.add(offset).write_volatile(0) };
        }
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }
}

impl Drop for KeySlot {
    fn drop(&mut self) {
        self.wipe(0, SLOT_BYTES);
        self.arena.give(self.start);
    }
}

fn map_page(methods: &[Protection]) -> io::Result<Page> {
    let mut refused = None;
    for method in methods {
        let page = match method {
            Protection::Secret => map_secret(),
            Protection::Locked => map_locked(),
            Protection::Unlocked => map_anonymous(),
        };
        match page {
            Ok(start) => return Ok(Page::new(start, *method)),
            Err(error) => refused = Some(error),
        }
    }
    let error = refused.unwrap_or_else(|| io::ErrorKind::Unsupported.into());
    let start = map_anonymous()?;
    static WARNED: std::sync::Once = std::sync::Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            %error,
            "the keys of write caches cannot be locked in memory, so they may reach this host's swap: raise the \
             limit of locked memory (`ulimit -l`, in a systemd unit LimitMEMLOCK=) by 4 KiB for four machines, or \
             encrypt the swap"
        );
    });
    Ok(Page::new(start, Protection::Unlocked))
}

impl Page {
    fn new(start: NonNull<u8>, protection: Protection) -> Self {
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: advice on our own new mapping; it changes no contents.
            let done = unsafe { rustix::mm::madvise(start.as_ptr().cast(), PAGE_BYTES, advice) };
            if let Err(error) = done {
                tracing::debug!(%error, ?advice, "a page for keys refuses advice");
            }
        }
        Self { start, protection, used: [false; SLOTS_PER_PAGE] }
    }
}

fn map_anonymous() -> io::Result<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            PAGE_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    }?;
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn map_locked() -> io::Result<NonNull<u8>> {
    let start = map_anonymous()?;
    // SAFETY: our own mapping. Locking brings the page in, so it never faults later.
    match unsafe { rustix::mm::mlock(start.as_ptr().cast(), PAGE_BYTES) } {
        Ok(()) => Ok(start),
        Err(error) => {
            // SAFETY: our own mapping, which nobody uses.
            let _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), PAGE_BYTES) };
            Err(error.into())
        }
    }
}

/// Maps memory that the kernel does not map; fails on systems without it (`ENOSYS`, or `EPERM` in some
/// containers).
fn map_secret() -> io::Result<NonNull<u8>> {
    // SAFETY: a system call without pointers. `O_CLOEXEC` is the one flag that it takes.
    let made = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
    let Ok(number @ 0..) = i32::try_from(made) else { return Err(io::Error::last_os_error()) };
    // SAFETY: a new descriptor that nobody else has.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::fs::ftruncate(&fd, PAGE_BYTES as u64)?;
    // SAFETY: a new mapping at an address of the kernel's choice, of a file that nobody else can cut.
    let start = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &fd,
            0,
        )
    }?;
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The flags of the mapping that an address is in, as `/proc/self/smaps` prints them.
    pub(crate) fn flags_of(address: usize) -> Vec<String> {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in text.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((start, end)) = range
                && let (Ok(start), Ok(end)) =
                    (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
            {
                inside = (start..end).contains(&address);
            }
            if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        panic!("no mapping with {address:#x}");
    }

    fn has(slot: &KeySlot, flag: &str) -> bool {
        flags_of(slot.as_ptr().addr()).iter().any(|f| f == flag)
    }

    /// Whether the system lets this process lock a page, determined without the tested code.
    fn system_locks() -> bool {
        // SAFETY: a new mapping at an address of the kernel's choice, which only these lines use.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page =
                libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert!(page != libc::MAP_FAILED);
            let locks = libc::mlock(page, 4096) == 0;
            assert_eq!(libc::munmap(page, 4096), 0);
            locks
        }
    }

    /// Whether the system has secret memory for this process, determined without the tested code.
    fn system_has_secrets() -> bool {
        // SAFETY: a new descriptor and a new mapping of it, which only these lines use.
        unsafe {
            let fd = libc::syscall(libc::SYS_memfd_secret, 0) as i32;
            if fd < 0 {
                return false;
            }
            assert_eq!(libc::ftruncate(fd, 4096), 0);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let page = libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, fd, 0);
            let is_mapped = page != libc::MAP_FAILED;
            if is_mapped {
                assert_eq!(libc::munmap(page, 4096), 0);
            }
            assert_eq!(libc::close(fd), 0);
            is_mapped
        }
    }

    #[test]
    fn keys_are_locked_and_neither_dumped_nor_inherited() {
        let slot = KeySlot::take().unwrap();
        assert!(has(&slot, "dd"), "not dumped");
        assert!(has(&slot, "dc"), "not inherited");
        assert_eq!(has(&slot, "lo"), slot.protection() != Protection::Unlocked);
        if system_locks() || system_has_secrets() {
            assert_ne!(
                slot.protection(),
                Protection::Unlocked,
                "the system can lock memory, but the key's is not locked"
            );
        }
    }

    #[test]
    fn each_method_gives_what_it_says() {
        static SECRET: Arena = Arena::new(&[Protection::Secret]);
        static LOCKED: Arena = Arena::new(&[Protection::Locked]);
        static NONE: Arena = Arena::new(&[]);
        for (arena, wanted, is_offered) in [
            (&SECRET, Protection::Secret, system_has_secrets()),
            (&LOCKED, Protection::Locked, system_locks()),
            (&NONE, Protection::Unlocked, true),
        ] {
            let slot = arena.take().unwrap();
            // If the system refuses a kind, the next kind is used and reported.
            let given = if is_offered { wanted } else { Protection::Unlocked };
            assert_eq!(slot.protection(), given);
            assert_eq!(has(&slot, "lo"), slot.protection() != Protection::Unlocked, "{wanted:?}");
            assert!(has(&slot, "dd"), "{wanted:?}");
        }
    }

    #[test]
    fn slots_are_apart_wiped_and_used_again() {
        static ARENA: Arena = Arena::new(&[Protection::Locked]);
        let slots: Vec<_> = (0..SLOTS_PER_PAGE + 1).map(|_| ARENA.take().unwrap()).collect();
        assert_eq!(ARENA.pages.lock().len(), 2);
        let mut starts: Vec<_> = slots.iter().map(|slot| slot.as_ptr().addr()).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= SLOT_BYTES));
        let first = slots[0].as_ptr();
        // SAFETY: the slot is ours.
        unsafe { first.write_bytes(0xA5, SLOT_BYTES) };
        let kept = slots.into_iter().nth(1).unwrap();
        // SAFETY: the page stays mapped, for `kept` is in it.
        let left = unsafe { std::slice::from_raw_parts(first, SLOT_BYTES) };
        assert!(left.iter().all(|byte| *byte == 0), "a dropped slot is wiped");
        assert_eq!(ARENA.pages.lock().len(), 1, "a page without keys goes");
        drop(kept);
        assert!(ARENA.pages.lock().is_empty());
    }
}
