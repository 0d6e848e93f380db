//! Hands the key of an overflow to the next process, in a page of `memfd_secret` whose descriptor is passed
//! on.
//!
//! The kernel does not map such a page, and a process with the descriptor maps it only to read the key. On a
//! host without `memfd_secret` the key is in the head of the memory file, which is locked in RAM if the
//! system allows that.
//!
//! `unsafe` here: the page is mapped for the moment in which the key is written or read.
#![expect(unsafe_code, reason = "a page is mapped for a moment; see above")]

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::mapping::PAGE;
use crate::overflow::gcm::KEY_BYTES;

/// The descriptors that the next process needs for a cache. Descriptors of the same files that another
/// process holds work as well.
#[derive(Debug)]
pub struct Handover {
    /// The memory file.
    pub memory: OwnedFd,
    /// The overflow, if the cache has one.
    pub overflow: Option<OwnedFd>,
    /// The page with its key, if the host has such pages.
    pub key: Option<OwnedFd>,
}

/// The overflow of another process, and its key.
pub(crate) struct Handed {
    pub(crate) file: std::fs::File,
    pub(crate) key: KeyBytes,
    /// The page from which the key was read.
    pub(crate) page: Option<KeyPage>,
}

/// Bytes of a key, wiped when they are dropped.
pub(crate) struct KeyBytes(Box<[u8; KEY_BYTES]>);

impl std::ops::Deref for KeyBytes {
    type Target = [u8; KEY_BYTES];
    fn deref(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl KeyBytes {
    pub(crate) fn new(key: &[u8; KEY_BYTES]) -> Self {
        Self(Box::new(*key))
    }

    fn random() -> Result<Self, String> {
        let mut key = Self(Box::new([0; KEY_BYTES]));
        aws_lc_rs::rand::fill(&mut key.0[..])
            .map_err(|e| format!("the system gave no random bytes for the key: {e}"))?;
        Ok(key)
    }
}

impl Drop for KeyBytes {
    fn drop(&mut self) {
        for byte in self.0.iter_mut() {
            // SAFETY: the byte is ours; a volatile write is not optimised away.
            unsafe { std::ptr::from_mut(byte).write_volatile(0) };
        }
    }
}

/// The place of an overflow's key for the next process.
pub(crate) enum KeyPlace {
    /// In a page of its own.
    Page(KeyPage),
    /// In the head of the memory file.
    Head(KeyBytes),
}

impl KeyPlace {
    /// Makes a random key, in the best place that the system has.
    pub(crate) fn random() -> Result<(Self, KeyBytes), String> {
        let key = KeyBytes::random()?;
        let place = match KeyPage::new(&key) {
            Ok(page) => Self::Page(page),
            Err(error) => {
                tracing::debug!(%error, "this host has no memfd_secret");
                Self::Head(KeyBytes::new(&key))
            }
        };
        Ok((place, key))
    }
}

/// A page with a key.
#[derive(Debug)]
pub(crate) struct KeyPage(OwnedFd);

impl KeyPage {
    /// Makes a page with this key.
    fn new(key: &[u8; KEY_BYTES]) -> io::Result<Self> {
        // SAFETY: a system call without pointers. `O_CLOEXEC` is the one flag that it takes.
        let made = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
        let Ok(number @ 0..) = i32::try_from(made) else { return Err(io::Error::last_os_error()) };
        // SAFETY: a new descriptor that nobody else has.
        let page = Self(unsafe { OwnedFd::from_raw_fd(number) });
        rustix::fs::ftruncate(&page.0, PAGE as u64)?;
        page.with(|bytes| *bytes = *key)?;
        Ok(page)
    }

    /// Takes over a page that another process made.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Reads the key.
    pub(crate) fn read(&self) -> io::Result<KeyBytes> {
        let size = rustix::fs::fstat(&self.0)?.st_size;
        if usize::try_from(size) != Ok(PAGE) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a page with a key"));
        }
        self.with(|bytes| KeyBytes::new(bytes))
    }

    /// A further descriptor of the page.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    fn with<T>(&self, use_it: impl FnOnce(&mut [u8; KEY_BYTES]) -> T) -> io::Result<T> {
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that is as long.
        let start = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), PAGE, access, MapFlags::SHARED, &self.0, 0)
        }?;
        // SAFETY: advice on our own mapping; it changes no contents.
        let _ = unsafe { rustix::mm::madvise(start, PAGE, Advice::LinuxDontDump) };
        let used = NonNull::new(start.cast::<[u8; KEY_BYTES]>()).map(|mut key| {
            // SAFETY: the first bytes of the mapping, which nobody else in this process uses.
            use_it(unsafe { key.as_mut() })
        });
        // SAFETY: our own mapping, which nobody uses any more.
        unsafe { rustix::mm::munmap(start, PAGE) }?;
        used.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}
