//! A driver that can break every rule: its memory is a memfd that it reads and writes as a file, and it sends
//! messages with the `vhost` crate's front-end.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Where the machine's memory starts for the guest and for the front-end's process.
pub const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
pub const MEMORY_BYTES: u64 = 4 << 20;

/// Offsets in memory.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x8000;
const USED: u64 = 0x10000;
/// First byte that tests may use, as a guest address.
pub const FREE: u64 = GUEST + 0x40000;

pub const SIZE: u16 = 16;
/// How long a test waits for an event that must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub const F_FLUSH: u64 = 1 << 9;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

pub struct Guest {
    pub frontend: Frontend,
    /// The front-end's connection, to send messages that a front-end must not send.
    pub connection: UnixStream,
    pub memory: File,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
    /// The next entry of the available ring.
    pub available: u16,
    /// How many answers were read, as an index of the ring.
    pub used: u16,
}

impl Guest {
    /// Connects and starts queue 0 with the usual features.
    pub fn start(path: &Path) -> Self {
        Self::with_features(path, F_FLUSH | F_INDIRECT)
    }

    pub fn with_features(path: &Path, features: u64) -> Self {
        let mut guest = Self::connect(path, features);
        guest.start_queue(0);
        guest
    }

    /// Connects and shares memory, without a queue.
    pub fn connect(path: &Path, features: u64) -> Self {
        Self::connect_with(path, features, sealable_memory())
    }

    /// Connects and shares this memory, without a queue.
    pub fn connect_with(path: &Path, features: u64, memory: File) -> Self {
        Self::connect_after(path, features, memory, |_| {})
    }

    /// The same, after something that a front-end does before the driver has accepted features.
    pub fn connect_after(
        path: &Path,
        features: u64,
        memory: File,
        first: impl FnOnce(&mut Frontend),
    ) -> Self {
        let connection = UnixStream::connect(path).unwrap();
        let mut frontend = Frontend::from_stream(connection.try_clone().unwrap(), 64);
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        let features = features | F_PROTOCOL | F_VERSION_1;
        assert_eq!(offered & features, features, "offered {offered:#x}");
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ));
        first(&mut frontend);
        frontend.set_features(features).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_mem_table(&[region(&memory)]).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
        Self {
            frontend,
            connection,
            memory,
            kick: event(),
            call: event(),
            error: event(),
            available: 0,
            used: 0,
        }
    }

    /// Shares the same memory in several regions, which end at these guest addresses.
    pub fn divide_memory(&self, ends: &[u64]) {
        let whole = region(&self.memory);
        let mut starts = vec![GUEST];
        starts.extend(ends);
        let regions: Vec<_> = starts
            .iter()
            .zip(starts.iter().skip(1).chain([&(GUEST + MEMORY_BYTES)]))
            .map(|(start, end)| VhostUserMemoryRegionInfo {
                guest_phys_addr: *start,
                memory_size: end - start,
                userspace_addr: USER + (start - GUEST),
                mmap_offset: start - GUEST,
                ..whole
            })
            .collect();
        self.frontend.set_mem_table(&regions).unwrap();
    }

    /// (Re)starts queue 0 on empty rings at `base`.
    pub fn start_queue(&mut self, base: u16) {
        self.write(GUEST + DESCRIPTORS, &vec![0; 16 * usize::from(SIZE)]);
        self.set_available_index(base);
        self.set_used_index(base);
        self.continue_queue(base);
    }

    /// (Re)starts queue 0 on the rings as they are. They are not cleared.
    pub fn continue_queue(&mut self, base: u16) {
        self.set_up_queue(base);
        self.frontend.set_vring_enable(0, true).unwrap();
    }

    /// Whether queue 0 may start at `base` with this index in its used ring.
    pub fn try_start(mut self, base: u16, used: u16) -> bool {
        self.set_available_index(used);
        self.set_used_index(used);
        self.set_up_queue(base);
        self.frontend.set_vring_enable(0, true).is_ok()
    }

    fn set_up_queue(&mut self, base: u16) {
        let rings = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: USER + DESCRIPTORS,
            used_ring_addr: USER + USED,
            avail_ring_addr: USER + AVAILABLE,
            log_addr: None,
        };
        self.frontend.set_vring_num(0, SIZE).unwrap();
        self.frontend.set_vring_addr(0, &rings).unwrap();
        self.frontend.set_vring_base(0, base).unwrap();
        self.frontend.set_vring_call(0, &self.call).unwrap();
        self.frontend.set_vring_err(0, &self.error).unwrap();
        self.frontend.set_vring_kick(0, &self.kick).unwrap();
    }

    pub fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let empty = vec![0; len as usize];
        self.frontend.get_config(offset, len, VhostUserConfigFlags::empty(), &empty).unwrap().1
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at - GUEST).unwrap();
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_exact_at(&mut bytes, at - GUEST).unwrap();
        bytes
    }

    fn read_u16(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.read(at, 2).try_into().unwrap())
    }

    pub fn descriptor(&self, index: u16, descriptor: (u64, u32, u16, u16)) {
        self.write(GUEST + DESCRIPTORS + 16 * u64::from(index), &encode(&[descriptor]));
    }

    /// A chain at `first`, one descriptor after the other.
    pub fn chain(&self, first: u16, parts: &[(u64, u32, u16)]) {
        for (number, &(addr, len, flags)) in parts.iter().enumerate() {
            let index = first + number as u16;
            let more = if number + 1 < parts.len() { NEXT } else { 0 };
            self.descriptor(index, (addr, len, flags | more, index + 1));
        }
    }

    pub fn set_available_index(&mut self, index: u16) {
        self.available = index;
        self.write(GUEST + AVAILABLE + 2, &index.to_le_bytes());
    }

    fn set_used_index(&mut self, index: u16) {
        self.used = index;
        self.write(GUEST + USED + 2, &index.to_le_bytes());
    }

    pub fn set_used_element(&self, index: u16, (head, written): (u16, u32)) {
        let element = [u32::from(head).to_le_bytes(), written.to_le_bytes()].concat();
        self.write(GUEST + USED + 4 + 8 * u64::from(index), &element);
    }

    /// Makes a chain available, without a kick.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.available % SIZE);
        self.write(GUEST + AVAILABLE + 4 + 2 * slot, &head.to_le_bytes());
        self.set_available_index(self.available.wrapping_add(1));
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    pub fn used_index(&self) -> u16 {
        self.read_u16(GUEST + USED + 2)
    }

    /// Sets the used entry after which the driver wants an interrupt.
    pub fn set_used_event(&self, index: u16) {
        self.write(GUEST + AVAILABLE + 4 + 2 * u64::from(SIZE), &index.to_le_bytes());
    }

    /// Waits for the next used entry: head and bytes written.
    pub fn next_used(&mut self) -> (u16, u32) {
        let started = Instant::now();
        while self.used_index() == self.used {
            assert!(started.elapsed() < PATIENCE, "no answer");
            std::thread::sleep(Duration::from_micros(200));
        }
        let entry = self.read(GUEST + USED + 4 + 8 * u64::from(self.used % SIZE), 8);
        self.used = self.used.wrapping_add(1);
        let head = u32::from_le_bytes(entry[..4].try_into().unwrap());
        (head as u16, u32::from_le_bytes(entry[4..].try_into().unwrap()))
    }

    /// Executes one request: header and `readable` in one buffer, an answer of `writable` bytes in another
    /// one, the status in a third. Returns the status and the answer.
    pub fn request(&mut self, kind: u32, sector: u64, readable: &[u8], writable: usize) -> (u8, Vec<u8>) {
        let (header, answer, status) = (FREE, FREE + 0x10000, FREE + 0x30000);
        self.write(header, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), readable].concat());
        self.write(status, &[0xee]);
        let mut parts = vec![(header, 16 + readable.len() as u32, 0)];
        if writable > 0 {
            parts.push((answer, writable as u32, WRITE));
        }
        parts.push((status, 1, WRITE));
        self.chain(0, &parts);
        self.offer(0);
        self.kick();
        let (head, written) = self.next_used();
        assert_eq!(head, 0);
        let status = self.read(status, 1)[0];
        assert!(written >= 1 && written as usize <= writable + 1, "{written} bytes written");
        (status, self.read(answer, writable))
    }

    /// Stops queue 0, and returns its position.
    pub fn stop_queue(&self) -> u16 {
        self.frontend.get_vring_base(0).unwrap() as u16
    }

    /// Waits until the server reports that the queue is broken.
    pub fn wait_broken(&self) {
        wait_for(&self.error);
    }
}

/// Memory like QEMU's, which can be sealed.
pub fn sealable_memory() -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory: File = rustix::fs::memfd_create("guest", flags).unwrap().into();
    memory.set_len(MEMORY_BYTES).unwrap();
    memory
}

pub fn region(memory: &File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST,
        memory_size: MEMORY_BYTES,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    }
}

/// The bytes of these descriptors in memory.
pub fn encode(descriptors: &[(u64, u32, u16, u16)]) -> Vec<u8> {
    let bytes = |&(addr, len, flags, next): &(u64, u32, u16, u16)| {
        [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    descriptors.iter().flat_map(bytes).collect()
}

/// Waits for the event and resets it.
pub fn wait_for(event: &EventFd) {
    let started = Instant::now();
    while event.read().is_err() {
        assert!(started.elapsed() < PATIENCE, "the event did not come");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Whether the event is set; resets it.
pub fn taken(event: &EventFd) -> bool {
    event.read().is_ok()
}
