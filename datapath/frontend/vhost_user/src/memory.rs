//! The machine's memory, mapped into this process: the only place where guest addresses become bytes.
//!
//! The front-end (QEMU) sends files with their guest addresses. Each is mapped as a whole, so that requests
//! move bytes between the machine's memory and the device without a copy in between.
//!
//! # Why `unsafe`
//! It maps files, and makes slices over mapped memory. Addresses and lengths come from the guest. Nothing
//! becomes a pointer before [`GuestMemory::segment`] has found it inside one mapped region, and a [`Segment`]
//! borrows the memory that keeps the region mapped. A range that crosses several regions, which are adjacent
//! in the guest and anywhere here, is copied piece by piece.
//!
//! The guest's processors, and other queues, may change these bytes at any time, which no lock here can
//! prevent. That is harmless as long as no decision depends on bytes that are read twice. Header, descriptors
//! and status are copied once before they are examined, and a `Device` treats data as opaque bytes. So a
//! guest that changes a buffer in flight damages only what it stores there itself. Slices live no longer than
//! one call of the device.
//!
//! If a file's owner truncates it while it is mapped, this process would end with SIGBUS. A memfd can be
//! sealed against that: QEMU's is sealed already, another one is sealed here. Other files cannot be sealed,
//! nor a memfd that was made without seals or whose seals are sealed. [`GuestMemory::not_lasting`] finds
//! those, and [`crate::Options::sealed_memory`] says whether they are refused. The length is checked after
//! sealing.
#![expect(unsafe_code, reason = "memory of another process is mapped and seen as slices; see above")]

use std::fs::{File, Metadata};
use std::marker::PhantomData;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// Most regions that a front-end may have mapped at the same time.
pub(crate) const REGIONS: usize = 256;

/// The file system of huge pages, as `fstatfs` names it.
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x9584_58f6;

/// The front-end's description of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionSpec {
    /// Address in the guest.
    pub(crate) guest: u64,
    /// Address in the front-end's process, which is used to describe rings.
    pub(crate) user: u64,
    /// Length in bytes.
    pub(crate) len: u64,
    /// Its offset in its file.
    pub(crate) file_offset: u64,
}

impl std::fmt::Display for RegionSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x} of the guest", self.len, self.guest)
    }
}

/// Why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MapError {
    #[error("the memory region of {0} is empty or passes the end of the address space")]
    BadRange(RegionSpec),
    #[error("the memory region of {0} overlaps another region")]
    Overlap(RegionSpec),
    #[error("the front-end has more than {REGIONS} memory regions")]
    TooMany,
    #[error(
        "the memory region of {spec} does not fit into its file of {file_bytes} bytes, or the file is not a regular file; \
         use memory-backend-memfd or memory-backend-file with share=on"
    )]
    BadFile { spec: RegionSpec, file_bytes: u64 },
    #[error(
        "cannot map the memory region of {spec}: the machine's memory would exceed the limit of {limit_bytes} bytes"
    )]
    TooLarge { spec: RegionSpec, limit_bytes: u64 },
    #[error("cannot map the memory region of {spec}: {source}")]
    Map { spec: RegionSpec, source: std::io::Error },
    #[error("there is no memory region of {0}")]
    Unknown(RegionSpec),
    #[error(
        "the memory region of {0} lies in a file that its owner can truncate, which would end this process and all of its \
         machines; use memory-backend-memfd, which is sealed against that unless seal=off"
    )]
    NotSealed(RegionSpec),
}

/// Limits the addresses of this process that the memory of one machine may use, whatever is behind them. A
/// sparse file costs its owner nothing, and if no addresses are left, no machine gets a thread or memory.
#[derive(Debug)]
pub(crate) struct Addresses {
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl Addresses {
    pub(crate) fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self { limit_bytes, used_bytes: AtomicU64::new(0) })
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Option<Taken> {
        let with = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit_bytes);
        self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with).ok()?;
        Some(Taken { of: Arc::clone(self), bytes })
    }
}

struct Taken {
    of: Arc<Addresses>,
    bytes: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.of.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A part of a file mapped into this process; unmapped when the last region in it is dropped.
struct Mapping {
    first: NonNull<u8>,
    len: usize,
    /// Dropped after unmapping, which returns the addresses.
    _addresses: Taken,
}

// SAFETY: a mapping is plain memory, valid on every thread until it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, offset: u64, addresses: Taken) -> std::io::Result<Self> {
        let len = usize::try_from(addresses.bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Huge pages are reserved at mapping, which costs nothing if the front-end has reserved them. Without
        // a reservation, touching a page for the first time when none is left would end this process with
        // SIGBUS. Other files need no memory before that.
        let flags = MapFlags::SHARED;
        // SAFETY: the kernel chooses an unused address, so no memory of this process is touched.
        let first = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, offset) }?;
        let first = NonNull::new(first.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let mapping = Self { first, len, _addresses: addresses };
        // SAFETY: the range was mapped just now. Guest memory is large and does not belong into a core dump.
        let _ = unsafe { rustix::mm::madvise(first.as_ptr().cast(), len, rustix::mm::Advice::LinuxDontDump) };
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; segments borrow the memory that holds this mapping.
        if let Err(error) = unsafe { rustix::mm::munmap(self.first.as_ptr().cast(), self.len) } {
            tracing::error!("cannot unmap guest memory: {error}");
        }
    }
}

/// Seals a file against shrinking if possible. Returns whether its pages can no longer be taken away.
fn lasts(file: &File) -> bool {
    // This fails for a file that is sealed already, so the seals are read afterwards.
    let _ = rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK);
    let is_sealed = rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    // A huge page can be taken out of a sealed file, and later there may be none to replace it.
    is_sealed && !has_huge_pages(file)
}

/// Whether the file is on hugetlbfs; `true` if this cannot be determined.
pub(crate) fn has_huge_pages(file: &File) -> bool {
    rustix::fs::fstatfs(file).map_or(true, |system| system.f_type == HUGETLBFS_MAGIC)
}

/// The unit of a mapping's offset and length. On hugetlbfs the block size is the page size.
fn page_bytes(file: &File, metadata: &Metadata) -> u64 {
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    if has_huge_pages(file) { metadata.blksize().max(page) } else { page }
}

#[derive(Clone)]
struct Region {
    spec: RegionSpec,
    /// Whether the region's pages cannot be taken away by the file's owner.
    lasts: bool,
    /// Address of the region's first byte in this process.
    first: NonNull<u8>,
    /// Keeps `first` valid.
    _mapping: Arc<Mapping>,
}

// SAFETY: the pointer goes into the mapping that the region keeps.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// All memory that the front-end has shared. It is never changed, but replaced as a whole.
#[derive(Clone)]
pub(crate) struct GuestMemory {
    regions: Vec<Region>,
    addresses: Arc<Addresses>,
}

impl GuestMemory {
    /// Memory without regions. Mapped addresses count in `addresses` while they are in use.
    pub(crate) fn new(addresses: Arc<Addresses>) -> Self {
        Self { regions: Vec::new(), addresses }
    }

    /// This memory with one more region.
    pub(crate) fn with(&self, spec: RegionSpec, file: &File) -> Result<Self, MapError> {
        if self.regions.len() >= REGIONS {
            return Err(MapError::TooMany);
        }
        let ends = [spec.guest, spec.user, spec.file_offset].map(|start| start.checked_add(spec.len));
        let [Some(guest_end), Some(_), Some(file_end)] = ends else { return Err(MapError::BadRange(spec)) };
        if spec.len == 0 {
            return Err(MapError::BadRange(spec));
        }
        let overlaps = |other: &Region| {
            spec.guest < other.spec.guest.saturating_add(other.spec.len) && other.spec.guest < guest_end
        };
        if self.regions.iter().any(overlaps) {
            return Err(MapError::Overlap(spec));
        }
        let lasts = lasts(file);
        let metadata = file.metadata().map_err(|source| MapError::Map { spec, source })?;
        if !metadata.is_file() || metadata.len() < file_end {
            return Err(MapError::BadFile { spec, file_bytes: metadata.len() });
        }
        let page = page_bytes(file, &metadata);
        let within = spec.file_offset.checked_rem(page).ok_or(MapError::BadRange(spec))?;
        // From the start of a page; the region's offset need not be aligned.
        let from = spec.file_offset.saturating_sub(within);
        let bytes = file_end.saturating_sub(from).checked_next_multiple_of(page);
        let limit_bytes = self.addresses.limit_bytes;
        let addresses = bytes.and_then(|bytes| self.addresses.take(bytes));
        let addresses = addresses.ok_or(MapError::TooLarge { spec, limit_bytes })?;
        let mapping = Mapping::new(file, from, addresses).map_err(|source| MapError::Map { spec, source })?;
        let within = usize::try_from(within).map_err(|_| MapError::BadRange(spec))?;
        // SAFETY: offset + len was found to be inside the file, and the mapping covers all of that from `from` on.
        let first = unsafe { mapping.first.add(within) };
        let mut regions = self.regions.clone();
        regions.push(Region { spec, lasts, first, _mapping: Arc::new(mapping) });
        Ok(Self { regions, addresses: Arc::clone(&self.addresses) })
    }

    /// This memory without one region. The region stays mapped while a request uses it.
    pub(crate) fn without(&self, spec: RegionSpec) -> Result<Self, MapError> {
        let same = |region: &Region| {
            region.spec.guest == spec.guest && region.spec.user == spec.user && region.spec.len == spec.len
        };
        let regions: Vec<Region> = self.regions.iter().filter(|r| !same(r)).cloned().collect();
        if regions.len() == self.regions.len() {
            return Err(MapError::Unknown(spec));
        }
        Ok(Self { regions, addresses: Arc::clone(&self.addresses) })
    }

    /// A region whose pages its owner can take away, if there is one.
    pub(crate) fn not_lasting(&self) -> Option<RegionSpec> {
        self.regions.iter().find(|region| !region.lasts).map(|region| region.spec)
    }

    /// The bytes at a guest address; `None` unless all of them lie in one region.
    pub(crate) fn segment(&self, guest: u64, len: u64) -> Option<Segment<'_>> {
        self.find(guest, len, |spec| spec.guest)
    }

    /// The bytes at an address of the front-end's process.
    pub(crate) fn segment_of_user(&self, user: u64, len: u64) -> Option<Segment<'_>> {
        self.find(user, len, |spec| spec.user)
    }

    /// Whether all bytes at a guest address are in memory, in one region or in several.
    pub(crate) fn has(&self, guest: u64, len: u64) -> bool {
        self.segment(guest, len).is_some() || self.each_piece(guest, len, |_| Some(())).is_some()
    }

    /// Copies bytes out of guest memory; `None`, and nothing copied, unless all of them are mapped.
    pub(crate) fn read(&self, guest: u64, into: &mut [u8]) -> Option<()> {
        match self.segment(guest, u64::try_from(into.len()).ok()?) {
            Some(segment) => segment.copy_to(into),
            None => self.read_pieces(guest, into)?,
        }
        Some(())
    }

    /// Copies bytes into guest memory; `None`, and nothing copied, unless all of the addresses are mapped.
    pub(crate) fn write(&self, guest: u64, from: &[u8]) -> Option<()> {
        match self.segment(guest, u64::try_from(from.len()).ok()?) {
            Some(mut segment) => segment.copy_from(from),
            None => self.write_pieces(guest, from)?,
        }
        Some(())
    }

    #[cold]
    fn read_pieces(&self, guest: u64, mut into: &mut [u8]) -> Option<()> {
        let len = u64::try_from(into.len()).ok().filter(|len| self.has(guest, *len))?;
        self.each_piece(guest, len, |segment| {
            let (part, rest) = std::mem::take(&mut into).split_at_mut_checked(segment.len())?;
            segment.copy_to(part);
            into = rest;
            Some(())
        })
    }

    #[cold]
    fn write_pieces(&self, guest: u64, mut from: &[u8]) -> Option<()> {
        let len = u64::try_from(from.len()).ok().filter(|len| self.has(guest, *len))?;
        self.each_piece(guest, len, |mut segment| {
            let (part, rest) = from.split_at_checked(segment.len())?;
            segment.copy_from(part);
            from = rest;
            Some(())
        })
    }

    /// Calls a function with the parts of a range in order, each in one region; `None` at the first part that
    /// is not mapped.
    #[cold]
    fn each_piece<'m>(
        &'m self,
        guest: u64,
        len: u64,
        mut take: impl FnMut(Segment<'m>) -> Option<()>,
    ) -> Option<()> {
        let (mut at, mut left) = (guest, len);
        while left > 0 {
            let rest_of_region = |region: &Region| {
                let offset = at.checked_sub(region.spec.guest)?;
                region.spec.len.checked_sub(offset).filter(|rest| *rest > 0)
            };
            let here = self.regions.iter().find_map(rest_of_region)?.min(left);
            take(self.segment(at, here)?)?;
            // A region never passes the end of the address space, so this does not wrap.
            at = at.wrapping_add(here);
            left = left.wrapping_sub(here);
        }
        Some(())
    }

    fn find(&self, start: u64, len: u64, base: impl Fn(&RegionSpec) -> u64) -> Option<Segment<'_>> {
        for region in &self.regions {
            let Some(offset) = start.checked_sub(base(&region.spec)) else { continue };
            if offset < region.spec.len {
                if len > region.spec.len.wrapping_sub(offset) {
                    return None;
                }
                let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
                // SAFETY: offset + len <= the region's length, all of which is mapped.
                let first = unsafe { region.first.add(offset) };
                return Some(Segment { first, len, memory: PhantomData });
            }
        }
        None
    }
}

/// Bytes of guest memory that stay mapped during `'m`.
pub(crate) struct Segment<'m> {
    first: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'m GuestMemory>,
}

impl Segment<'_> {
    /// The address in this process, for rings.
    pub(crate) fn first(&self) -> NonNull<u8> {
        self.first
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes, for a device that stores them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for 'm; concurrent changes by the guest are harmless as the module's documentation
        // explains.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    /// Calls a function, such as a read of the device, that fills the bytes.
    pub(crate) fn lend_mut<R>(&mut self, to: impl FnOnce(&mut [u8]) -> R) -> R {
        // SAFETY: as above.
        to(unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) })
    }

    /// Copies out, up to the shorter length.
    pub(crate) fn copy_to(&self, into: &mut [u8]) {
        let len = self.len.min(into.len());
        // SAFETY: both are valid for `len`; a buffer of ours is not guest memory, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.first.as_ptr(), into.as_mut_ptr(), len) }
    }

    /// Copies in, up to the shorter length.
    pub(crate) fn copy_from(&mut self, from: &[u8]) {
        let len = self.len.min(from.len());
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.first.as_ptr(), len) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    pub(crate) fn memfd(bytes: u64) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file: File = rustix::fs::memfd_create("guest", flags).unwrap().into();
        file.set_len(bytes).unwrap();
        file
    }

    /// Without any region, and without a limit.
    impl Default for GuestMemory {
        fn default() -> Self {
            Self::new(Addresses::new(u64::MAX))
        }
    }

    fn spec(guest: u64, len: u64, file_offset: u64) -> RegionSpec {
        RegionSpec { guest, user: 0x7000_0000_u64.wrapping_add(guest), len, file_offset }
    }

    #[test]
    fn only_whole_ranges_of_one_region_are_found() {
        let file = memfd(3 << 20);
        let memory = GuestMemory::default().with(spec(0, 1 << 20, 0), &file).unwrap();
        let memory = memory.with(spec(1 << 20, 1 << 20, 2 << 20), &file).unwrap();
        memory.segment(0, 16).unwrap().copy_from(&[7; 16]);
        let mut back = [0; 16];
        memory.segment_of_user(0x7000_0000, 16).unwrap().copy_to(&mut back);
        assert_eq!(back, [7; 16]);
        assert_eq!(memory.segment((1 << 20) - 1, 1).unwrap().len(), 1);
        for (guest, len) in
            [((1 << 20) - 1, 2), (2 << 20, 1), (0, 1 << 21), (u64::MAX, 1), (u64::MAX, u64::MAX)]
        {
            assert!(memory.segment(guest, len).is_none(), "{guest:#x}+{len:#x}");
        }
        // Bytes that were written through the second region are at its offset of the file.
        memory.segment(1 << 20, 3).unwrap().copy_from(b"abc");
        let mut bytes = [0; 3];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 2 << 20).unwrap();
        assert_eq!(&bytes, b"abc");
    }

    #[test]
    fn ranges_over_regions_that_follow_one_another_are_copied_in_pieces() {
        let file = memfd(0x4000);
        // In another order in the file, of odd lengths, and with a gap before the last one.
        let regions =
            [(0x1000, 0x801, 0x2001), (0x1801, 3, 0x1000), (0x1804, 0x1000, 0), (0x2805, 16, 0x3000)];
        let memory = regions.iter().try_fold(GuestMemory::default(), |memory, &(guest, len, offset)| {
            memory.with(spec(guest, len, offset), &file)
        });
        let memory = memory.unwrap();
        let bytes: Vec<u8> = (0..100).collect();
        memory.write(0x17f0, &bytes).unwrap();
        let mut back = [0; 100];
        memory.read(0x17f0, &mut back).unwrap();
        assert_eq!(&back[..], bytes);
        for (guest, offset, part) in [(0x17f0, 0x27f1, 0..17), (0x1801, 0x1000, 17..20), (0x1804, 0, 20..100)]
        {
            let mut there = vec![0; part.len()];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut there, offset).unwrap();
            assert_eq!(there, &bytes[part], "{guest:#x}");
        }
        assert!(memory.has(0x1000, 0x1804) && memory.has(0x2805, 16));
        // Nothing is copied if a byte is missing.
        for (guest, len) in [(0x17f0, 0x1100), (0xfff, 100), (0x2800, 6), (u64::MAX - 1, 4)] {
            assert!(!memory.has(guest, len), "{guest:#x}+{len:#x}");
            assert_eq!(memory.write(guest, &vec![0xee; usize::try_from(len).unwrap()]), None);
            assert_eq!(memory.read(guest, &mut vec![0; usize::try_from(len).unwrap()]), None);
        }
        memory.read(0x17f0, &mut back).unwrap();
        assert_eq!(&back[..], bytes);
    }

    #[test]
    fn regions_that_lie_are_refused() {
        let file = memfd(1 << 20);
        let none = GuestMemory::default();
        let refused = |spec| none.with(spec, &file).err().unwrap().to_string();
        assert!(refused(spec(0, 2 << 20, 0)).contains("does not fit into its file"));
        assert!(refused(spec(0, 1 << 20, 4096)).contains("does not fit into its file"));
        assert!(refused(spec(0, 0, 0)).contains("empty"));
        assert!(refused(spec(u64::MAX - 10, 4096, 0)).contains("passes the end"));
        let one = none.with(spec(4096, 8192, 0), &file).unwrap();
        assert!(matches!(one.with(spec(0, 4097, 0), &file), Err(MapError::Overlap(_))));
        assert!(matches!(one.without(spec(0, 8192, 0)), Err(MapError::Unknown(_))));
        assert!(one.without(spec(4096, 8192, 0)).unwrap().segment(4096, 1).is_none());
        let zero = File::open("/dev/zero").unwrap();
        assert!(matches!(none.with(spec(0, 4096, 0), &zero), Err(MapError::BadFile { .. })));
    }

    #[test]
    fn memory_cannot_be_taken_away_while_it_is_used() {
        let file = memfd(1 << 20);
        let memory = GuestMemory::default().with(spec(0, 1 << 20, 0), &file).unwrap();
        file.set_len(0).unwrap_err();
        memory.segment((1 << 20) - 1, 1).unwrap().copy_from(&[1]);
    }

    #[test]
    fn more_addresses_than_a_machine_may_have_are_not_taken() {
        const MIB: u64 = 1 << 20;
        let file = memfd(u64::MAX >> 1);
        let addresses = Addresses::new(3 * MIB);
        let none = GuestMemory::new(Arc::clone(&addresses));
        let used = || addresses.used_bytes.load(Ordering::Relaxed);
        // Only the requested part counts, rounded to whole pages.
        let one = none.with(spec(0, MIB, (1 << 60) + 5), &file).unwrap();
        assert_eq!(used(), MIB + 4096);
        let both = one.with(spec(4 * MIB, MIB, 0), &file).unwrap();
        let refused = both.with(spec(8 * MIB, MIB, 0), &file);
        assert!(matches!(refused, Err(MapError::TooLarge { limit_bytes, .. }) if limit_bytes == 3 * MIB));
        let whole = none.with(spec(0, u64::MAX >> 1, 0), &file);
        assert!(matches!(whole, Err(MapError::TooLarge { .. })));
        // Removed memory counts while a request uses it.
        let other = both.without(spec(4 * MIB, MIB, 0)).unwrap();
        assert!(other.with(spec(8 * MIB, MIB, 0), &file).is_err());
        drop(both);
        other.with(spec(8 * MIB, MIB, 0), &file).unwrap().segment(8 * MIB, MIB).unwrap();
        drop((one, other));
        assert_eq!(used(), 0);
    }

    #[test]
    fn huge_pages_that_are_not_there_are_refused() {
        let flags =
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        // A kernel without huge pages cannot provide them.
        let Ok(file) = rustix::fs::memfd_create("guest", flags) else { return };
        let file: File = file.into();
        // More than this host has, and may create.
        let pages = ["nr_hugepages", "nr_overcommit_hugepages"].map(|name| {
            let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
            std::fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
        });
        let bytes = (pages[0] + pages[1] + 1) << 21;
        file.set_len(bytes).unwrap();
        let refused = GuestMemory::default().with(spec(0, bytes, 0), &file).err().unwrap().to_string();
        assert!(refused.contains("cannot map the memory region"), "{refused}");
    }

    #[test]
    fn memory_that_can_be_taken_away_is_found() {
        let with_seals = |seals| {
            let file = memfd(4096);
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
            file
        };
        let without: File = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap().into();
        without.set_len(4096).unwrap();
        let regular = tempfile::tempfile().unwrap();
        regular.set_len(4096).unwrap();
        let region = spec(0, 4096, 0);
        let good = GuestMemory::default().with(spec(4096, 4096, 0), &memfd(4096)).unwrap();
        for (file, found) in [
            (memfd(4096), None),
            // As QEMU seals it.
            (with_seals(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL), None),
            (with_seals(SealFlags::SEAL), Some(region)),
            (with_seals(SealFlags::GROW | SealFlags::SEAL), Some(region)),
            (without, Some(region)),
            (regular, Some(region)),
        ] {
            let memory = good.with(region, &file).unwrap();
            assert_eq!(memory.not_lasting(), found);
            assert_eq!(file.set_len(0).is_err(), found.is_none(), "what lasts cannot be truncated");
        }
    }
}
