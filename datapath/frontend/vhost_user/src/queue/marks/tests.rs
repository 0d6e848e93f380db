//! A server that is killed between any two of its stores, and the servers after it.

use std::sync::atomic::AtomicUsize;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use parking_lot::Mutex;

use super::super::post::PostBox;
use super::super::thread::QueueThread;
use super::super::{RingAddresses, Setup, begin};
use super::*;
use crate::disk::Disk;
use crate::memory::tests::memfd;
use crate::memory::{GuestMemory, RegionSpec};
use crate::server::Options;

const ENTRIES: u16 = 32;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
const BUFFERS: u64 = 0x8000;
const MEMORY_BYTES: u64 = 0x80000;
const SECTOR: u64 = 512;

/// A disk that outlives its server. The request of a killed server does not happen.
#[derive(Default)]
struct Lasting {
    sectors: Mutex<Vec<u8>>,
    /// The first sectors of all requests, in the order in which the device got them.
    asked: Mutex<Vec<u64>>,
    waits: AtomicUsize,
}

impl Lasting {
    fn write(&self, at: u64, from: &[u8]) {
        if stores() {
            let at = at as usize;
            self.sectors.lock()[at..at + from.len()].copy_from_slice(from);
        }
    }
}

impl Device for Lasting {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: 1 << 20,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: false,
        }
    }

    /// Every third sector must wait.
    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        let Op::Write { range, from, .. } = op else { unreachable!("the driver only writes") };
        self.asked.lock().push(range.offset() / SECTOR);
        if (range.offset() / SECTOR).is_multiple_of(3) {
            self.waits.fetch_add(1, Ordering::Relaxed);
            return Ok(Attempt::MustWait);
        }
        self.write(range.offset(), from);
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        let Request::Write { range, buffer, .. } = request else { unreachable!("the driver only writes") };
        self.write(range.offset(), &buffer);
        done.complete(Ok(()), buffer);
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

/// A driver with its memory, and what the next server gets of the one before.
struct Driver {
    memory: Arc<GuestMemory>,
    region: File,
    region_bytes: u64,
    disk: Arc<Lasting>,
    offered: u16,
}

impl Driver {
    fn new() -> Self {
        let spec = RegionSpec { guest: 0, user: 0, len: MEMORY_BYTES, file_offset: 0 };
        let memory = GuestMemory::new(crate::memory::Addresses::new(1 << 30));
        let memory = Arc::new(memory.with(spec, &memfd(MEMORY_BYTES)).unwrap());
        let (region, region_bytes) = make(2, ENTRIES).unwrap();
        let disk = Lasting { sectors: Mutex::new(vec![0; 1 << 20]), ..Lasting::default() };
        Self { memory, region, region_bytes, disk: Arc::new(disk), offered: 0 }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.segment(at, bytes.len() as u64).unwrap().copy_from(bytes);
    }

    fn number(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read(at, &mut bytes).unwrap();
        u16::from_le_bytes(bytes)
    }

    /// Offers a write of a sector that no other request writes, with a head that is not in order.
    fn offer(&mut self) {
        let number = u64::from(self.offered);
        let place = (number * 7 + 3) % (u64::from(ENTRIES) / 4);
        let (head, buffer) = (place * 4, BUFFERS + place * 0x1000);
        self.put(buffer, &[&1_u32.to_le_bytes()[..], &[0; 4], &number.to_le_bytes()].concat());
        self.put(buffer + 0x400, &[number as u8 + 1; 512]);
        let parts = [(buffer, 16_u32, 1_u16), (buffer + 0x400, 512, 1), (buffer + 0x800, 1, 2)];
        for (index, (addr, len, flags)) in (head..).zip(parts) {
            let rest = [&flags.to_le_bytes()[..], &(index as u16 + 1).to_le_bytes()].concat();
            let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &rest].concat();
            self.put(DESCRIPTORS + 16 * index, &bytes);
        }
        self.put(AVAILABLE + 4 + 2 * (number % u64::from(ENTRIES)), &(head as u16).to_le_bytes());
        self.offered += 1;
        self.put(AVAILABLE + 2, &self.offered.to_le_bytes());
    }

    /// The sector of the request that an entry of the used ring answers.
    fn answered(&self) -> Vec<u64> {
        (0..self.number(USED + 2))
            .map(|index| {
                let head = u64::from(self.number(USED + 4 + 8 * u64::from(index)));
                let mut sector = [0; 8];
                self.memory.read(BUFFERS + head / 4 * 0x1000 + 8, &mut sector).unwrap();
                u64::from_le_bytes(sector)
            })
            .collect()
    }

    /// The next server of the queue.
    fn serve(&self) -> Result<QueueThread, String> {
        let region = Region::open(&self.region, (self.region_bytes, 0), 2, ENTRIES).unwrap();
        let options = Options { recovered: true, ..Options::default() };
        let mut setup = Setup {
            disk: Arc::new(Disk::new(Arc::clone(&self.disk) as _, options)),
            memory: Arc::clone(&self.memory),
            number: 1,
            entries: ENTRIES,
            addresses: RingAddresses { descriptors: DESCRIPTORS, available: AVAILABLE, used: USED },
            base: self.number(USED + 2),
            event_idx: false,
            indirect: false,
            kick: rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap(),
            call: None,
            error: None,
            region: Some(region),
        };
        let (rings, marked) = begin(&mut setup).map_err(|error| error.to_string())?;
        Ok(QueueThread::new(setup, rings, Arc::new(PostBox::new().unwrap()), marked))
    }

    /// Serves until nothing is to be done, or until `stores` stores were made. Returns whether all were needed.
    fn serve_for(&self, count: usize) -> bool {
        let mut queue = self.serve().unwrap();
        limit_stores(count);
        for _ in 0..8 {
            queue.round();
        }
        drop(queue);
        limit_stores(usize::MAX) == 0
    }
}

#[test]
fn a_server_killed_between_any_two_stores_loses_no_request() {
    let mut kills = 0;
    for first in 0.. {
        let mut all_of_second = false;
        for second in 0.. {
            let mut driver = Driver::new();
            for _ in 0..2 {
                driver.offer();
            }
            assert!(!driver.serve_for(1000));
            for _ in 0..5 {
                driver.offer();
            }
            let killed = driver.serve_for(first);
            let seen = driver.answered();
            driver.disk.asked.lock().clear();
            let killed_again = driver.serve_for(second);
            kills += usize::from(killed) + usize::from(killed_again);
            // Requests that were answered before are not done again.
            let asked: Vec<_> = driver.disk.asked.lock().clone();
            assert!(
                asked.iter().all(|sector| !seen.contains(sector)),
                "{first} {second}: {asked:?} {seen:?}"
            );
            // The requests come in the order of the driver.
            assert!(asked.is_sorted(), "{first} {second}: {asked:?}");
            driver.offer();
            assert!(!driver.serve_for(1000));
            let mut answered = driver.answered();
            answered.sort_unstable();
            assert_eq!(answered, (0..8).collect::<Vec<_>>(), "{first} {second}");
            let sectors = driver.disk.sectors.lock();
            for sector in 0..8_u8 {
                let at = usize::from(sector) * 512;
                assert!(sectors[at..at + 512].iter().all(|byte| *byte == sector + 1), "{first} {second}");
            }
            all_of_second = !killed_again;
            if all_of_second {
                break;
            }
        }
        assert!(all_of_second);
        if first > 200 {
            break;
        }
    }
    assert!(kills > 500, "{kills}");
}
