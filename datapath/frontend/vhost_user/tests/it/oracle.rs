//! Random requests, valid and invalid in every way, compared with a second implementation of the rules: the
//! answer to the guest, the disk's contents, and whether the queue breaks must be equal after each of them.
//!
//! `HEADWATER_VHOST_REQUESTS` sets the number of requests, instead of some thousands.

use std::sync::Arc;

use crate::guest::{
    F_FLUSH, F_INDIRECT, FREE, GUEST, Guest, INDIRECT, MEMORY_BYTES, NEXT, SIZE, WRITE, encode,
};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};
use headwater_vhost_user::{Options, Server};

const DISK_BYTES: u64 = 64 << 10;
/// Buffers and tables are here if they are in memory at all, or else at the end of memory.
const WINDOW: u64 = 0x8000;
const OUTSIDE: u64 = GUEST + MEMORY_BYTES;
const SERIAL: &[u8; 20] = b"serial\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

type Descriptor = (u64, u32, u16, u16);

/// The expected result of a request.
#[derive(Debug, PartialEq)]
enum Expected {
    Broken,
    Answered { written: u32 },
}

/// The expected contents of the machine's memory and of the disk.
struct Oracle {
    memory: Vec<u8>,
    disk: Vec<u8>,
}

impl Oracle {
    fn at(&self, addr: u64, len: u64) -> Option<std::ops::Range<usize>> {
        let start = addr.checked_sub(GUEST)?;
        let end = start.checked_add(len).filter(|end| *end <= MEMORY_BYTES)?;
        (start < MEMORY_BYTES).then_some(start as usize..end as usize)
    }

    fn descriptor(&self, table: u64, index: u64) -> Option<Descriptor> {
        let bytes = &self.memory[self.at(table.wrapping_add(16 * index), 16)?];
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let addr = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        Some((addr, u32::from_le_bytes(bytes[8..12].try_into().unwrap()), u16_at(12), u16_at(14)))
    }

    /// The request's parts in order, or `None` if the ring is invalid.
    fn walk(&self, table: &[Descriptor], head: u16) -> Option<Vec<Descriptor>> {
        let (mut parts, mut next) = (Vec::new(), usize::from(head));
        while parts.len() < table.len() {
            let part = *table.get(next)?;
            if part.2 & INDIRECT != 0 {
                let is_possible = part.1.is_multiple_of(16) && (16..=16384).contains(&part.1);
                if part.2 & NEXT != 0 || !is_possible {
                    return None;
                }
                return self.walk_table(part.0, u64::from(part.1 / 16), parts);
            }
            parts.push(part);
            if part.2 & NEXT == 0 {
                return Some(parts);
            }
            next = part.3.into();
        }
        None
    }

    fn walk_table(&self, at: u64, count: u64, mut parts: Vec<Descriptor>) -> Option<Vec<Descriptor>> {
        let mut next = 0;
        for _ in 0..count {
            let part = self.descriptor(at, next)?;
            if part.2 & INDIRECT != 0 {
                return None;
            }
            parts.push(part);
            if part.2 & NEXT == 0 {
                return Some(parts);
            }
            next = u64::from(part.3);
            if next >= count {
                return None;
            }
        }
        None
    }

    fn serve(&mut self, table: &[Descriptor], head: u16) -> Expected {
        let Some(parts) = self.walk(table, head) else { return Expected::Broken };
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for (addr, len, flags, _) in parts {
            let list = if flags & WRITE != 0 { &mut writable } else { &mut readable };
            if len > 0 {
                list.push((addr, u64::from(len)));
            }
            if flags & WRITE == 0 && !writable.is_empty() {
                return Expected::Broken;
            }
        }
        let Some(last) = writable.last_mut() else { return Expected::Broken };
        last.1 -= 1;
        let Some(status) = last.0.checked_add(last.1).and_then(|addr| self.at(addr, 1)) else {
            return Expected::Broken;
        };
        writable.retain(|buffer| buffer.1 > 0);
        let (code, written) = match self.execute(readable, &writable) {
            Ok(written) => (OK, written),
            Err(code) => (code, 0),
        };
        self.memory[status.start] = code;
        Expected::Answered { written: written as u32 + 1 }
    }

    fn execute(&mut self, mut readable: Vec<(u64, u64)>, writable: &[(u64, u64)]) -> Result<u64, u8> {
        let mut header = Vec::new();
        for buffer in &mut readable {
            let len = buffer.1.min(16 - header.len() as u64);
            if len > 0 {
                header.extend_from_slice(&self.memory[self.at(buffer.0, len).ok_or(IOERR)?]);
                *buffer = (buffer.0.wrapping_add(len), buffer.1 - len);
            }
        }
        readable.retain(|buffer| buffer.1 > 0);
        let kind = u32::from_le_bytes(header.get(..4).ok_or(IOERR)?.try_into().unwrap());
        let sector = u64::from_le_bytes(header.get(8..16).ok_or(IOERR)?.try_into().unwrap());
        match kind {
            0 => {
                let disk = self.disk_range(sector, writable)?;
                let places = self.places(writable)?;
                let mut from = disk.start;
                for place in places {
                    let len = place.len();
                    self.memory[place].copy_from_slice(&self.disk[from..from + len]);
                    from += len;
                }
                Ok(disk.len() as u64)
            }
            1 => {
                let disk = self.disk_range(sector, &readable)?;
                let data = self.gather(&readable)?;
                self.disk[disk].copy_from_slice(&data);
                Ok(0)
            }
            4 => Ok(0),
            8 => {
                let mut rest = &SERIAL[..];
                for &(addr, len) in writable {
                    let place = self.at(addr, len).ok_or(IOERR)?;
                    let (now, later) = rest.split_at(rest.len().min(place.len()));
                    self.memory[place.start..place.start + now.len()].copy_from_slice(now);
                    rest = later;
                }
                Ok((SERIAL.len() - rest.len()) as u64)
            }
            11 | 13 => self.ranges(kind, &readable).map(|()| 0),
            _ => Err(UNSUPP),
        }
    }

    fn places(&self, buffers: &[(u64, u64)]) -> Result<Vec<std::ops::Range<usize>>, u8> {
        buffers.iter().map(|&(addr, len)| self.at(addr, len).ok_or(IOERR)).collect()
    }

    fn gather(&self, buffers: &[(u64, u64)]) -> Result<Vec<u8>, u8> {
        Ok(self.places(buffers)?.into_iter().flat_map(|place| self.memory[place].to_vec()).collect())
    }

    fn disk_range(&self, sector: u64, buffers: &[(u64, u64)]) -> Result<std::ops::Range<usize>, u8> {
        let len: u64 = buffers.iter().map(|buffer| buffer.1).sum();
        let start = sector.checked_mul(512).ok_or(IOERR)?;
        let end = start.checked_add(len).filter(|end| *end <= DISK_BYTES).ok_or(IOERR)?;
        if len.is_multiple_of(512) { Ok(start as usize..end as usize) } else { Err(IOERR) }
    }

    fn ranges(&mut self, kind: u32, readable: &[(u64, u64)]) -> Result<(), u8> {
        let total: u64 = readable.iter().map(|buffer| buffer.1).sum();
        if total > 256 {
            return Err(IOERR);
        }
        let list = self.gather(readable)?;
        if list.is_empty() || !list.len().is_multiple_of(16) {
            return Err(IOERR);
        }
        let mut ranges = Vec::new();
        for range in list.chunks(16) {
            let sector = u64::from_le_bytes(range[..8].try_into().unwrap());
            let sectors = u32::from_le_bytes(range[8..12].try_into().unwrap());
            let flags = u32::from_le_bytes(range[12..].try_into().unwrap());
            if flags > u32::from(kind == 13) {
                return Err(UNSUPP);
            }
            if sectors > 1 << 22 || sector.checked_mul(512).is_none() {
                return Err(IOERR);
            }
            ranges.push((sector * 512, u64::from(sectors) * 512));
        }
        let fits = |&(at, len): &(u64, u64)| at.checked_add(len).is_some_and(|end| end <= DISK_BYTES);
        if !ranges.iter().all(fits) {
            return Err(IOERR);
        }
        for (at, len) in ranges {
            self.disk[at as usize..(at + len) as usize].fill(0);
        }
        Ok(())
    }
}

/// Makes requests of which about half are valid.
struct Maker(Rng);

impl Maker {
    fn one_in(&mut self, n: u64) -> bool {
        self.0.below(n) == 0
    }

    fn addr(&mut self) -> u64 {
        match self.0.below(40) {
            0 => self.0.next_u64(),
            1 => OUTSIDE - self.0.below(600),
            2 => GUEST - self.0.below(3),
            _ => FREE + self.0.below(WINDOW),
        }
    }

    fn len(&mut self) -> u32 {
        match self.0.below(24) {
            0 => self.0.next_u64() as u32,
            1 => 0,
            2..=7 => 1 + self.0.below(1100) as u32,
            _ => 512 * (1 + self.0.below(4) as u32),
        }
    }

    fn header(&mut self) -> Vec<u8> {
        let kind = [0_u32, 0, 0, 1, 1, 1, 4, 8, 11, 13, 99][self.0.below(11) as usize];
        let sector = if self.one_in(20) { self.0.next_u64() } else { self.0.below(DISK_BYTES / 512 + 2) };
        let mut bytes = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        if kind > 8 && !self.one_in(8) {
            for _ in 0..1 + self.0.below(3) {
                let flags = if self.one_in(6) { self.0.below(4) } else { 0 } as u32;
                let sectors = if self.one_in(12) { self.0.next_u64() as u32 } else { self.0.below(9) as u32 };
                let sector = self.0.below(DISK_BYTES / 512);
                bytes.extend(
                    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat(),
                );
            }
        }
        bytes
    }

    /// The parts of a request: writes its bytes into memory, and returns its descriptors in order.
    fn parts(&mut self, guest: &Guest) -> Vec<(u64, u32, u16)> {
        let header = self.header();
        let at = FREE + self.0.below(WINDOW);
        guest.write(at, &header);
        let cut = if self.one_in(3) { self.0.below(header.len() as u64 + 1) } else { 0 };
        let mut parts = vec![(at, cut as u32, 0), (at + cut, header.len() as u32 - cut as u32, 0)];
        parts.retain(|part| part.1 > 0);
        for flags in [0, WRITE] {
            for _ in 0..self.0.below(3) {
                parts.push((self.addr(), self.len(), flags));
            }
        }
        parts.push((self.addr(), 1, WRITE));
        if self.one_in(12) {
            let (one, other) = (self.0.below(parts.len() as u64), self.0.below(parts.len() as u64));
            parts.swap(one as usize, other as usize);
        }
        parts
    }

    fn linked(&mut self, parts: &[(u64, u32, u16)], first: u16) -> Vec<Descriptor> {
        let last = parts.len() - 1;
        let mut table: Vec<Descriptor> = (first..)
            .zip(parts)
            .enumerate()
            .map(|(n, (index, &(addr, len, flags)))| {
                (addr, len, flags | if n < last { NEXT } else { 0 }, index + 1)
            })
            .collect();
        if self.one_in(10) {
            let victim = &mut table[self.0.below(parts.len() as u64) as usize];
            match self.0.below(3) {
                0 => victim.3 = self.0.below(u64::from(SIZE) + 2) as u16,
                1 => victim.2 ^= 1 << self.0.below(3),
                _ => victim.2 |= NEXT,
            }
        }
        table
    }
}

/// Executes requests in memory that is divided into regions at these addresses.
fn check(waits: Waits, seed: u64, ends: &[u64]) {
    let count =
        std::env::var("HEADWATER_VHOST_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(2500);
    let dir = tempfile::tempdir().unwrap();
    let disk = ReferenceDisk::with_options(DISK_BYTES, ReferenceOptions { waits, ..Default::default() });
    let disk = Arc::new(disk);
    let options = Options { serial: "serial".into(), ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options).unwrap();
    let mut guest = Guest::connect(server.path(), F_FLUSH | F_INDIRECT);
    guest.divide_memory(ends);
    guest.start_queue(0);
    let mut maker = Maker(Rng::new(seed));
    guest.write(FREE, &maker.0.bytes(2 * WINDOW as usize));
    let memory = guest.read(GUEST, MEMORY_BYTES as usize);
    let mut oracle = Oracle { memory, disk: vec![0; DISK_BYTES as usize] };
    let (mut broken, mut answered) = (0_u32, [0_u32; 3]);
    for number in 0..count {
        let parts = maker.parts(&guest);
        let mut table = vec![(0, 0, 0, 0); usize::from(SIZE)];
        let head = maker.0.below(u64::from(SIZE) - 8) as u16;
        if maker.one_in(3) {
            let inner = maker.linked(&parts, 0);
            let at = if maker.one_in(20) { maker.addr() } else { FREE + maker.0.below(WINDOW) };
            if (FREE..FREE + WINDOW).contains(&at) {
                guest.write(at, &encode(&inner));
            }
            let odd = if maker.one_in(20) { maker.0.below(40) as u32 } else { 0 };
            table[usize::from(head)] = (at, 16 * inner.len() as u32 + odd, INDIRECT, 0);
        } else {
            let linked = maker.linked(&parts, head);
            table[usize::from(head)..][..linked.len()].copy_from_slice(&linked);
        }
        for (index, descriptor) in table.iter().enumerate() {
            guest.descriptor(index as u16, *descriptor);
        }
        let head = if maker.one_in(60) { SIZE + maker.0.below(9) as u16 } else { head };
        // Memory that the driver has changed: rings, and the new request.
        for (start, len) in [(GUEST, 0x10400), (FREE, 2 * WINDOW)] {
            let place = oracle.at(start, len).unwrap();
            oracle.memory[place].copy_from_slice(&guest.read(start, len as usize));
        }
        let fate = oracle.serve(&table, head);
        guest.offer(head);
        guest.kick();
        match fate {
            Expected::Broken => {
                broken += 1;
                guest.wait_broken();
                guest.stop_queue();
                guest.start_queue(0);
            }
            Expected::Answered { written } => {
                assert_eq!(guest.next_used(), (head, written), "request {number} of seed {seed}");
                for (start, len) in [(FREE, 2 * WINDOW), (OUTSIDE - 4096, 4096)] {
                    let place = oracle.at(start, len).unwrap();
                    let same = guest.read(start, len as usize) == oracle.memory[place];
                    assert!(same, "memory after request {number} of seed {seed}: {table:x?}");
                }
                let status = written.min(2) as usize;
                answered[status] += 1;
            }
        }
        assert!(disk.contents() == oracle.disk, "the disk after request {number} of seed {seed}: {table:x?}");
    }
    println!("{broken} broke the queue, {answered:?} answered");
    assert!(broken > count / 50 && answered[2] > count / 50, "requests of all kinds: {broken} {answered:?}");
}

#[test]
fn immediate_requests_follow_the_model() {
    check(Waits::Never, 11, &[]);
}

#[test]
fn waiting_requests_follow_the_model() {
    check(Waits::Always, 12, &[]);
}

#[test]
fn requests_across_memory_regions_follow_the_model() {
    // At addresses that are multiples of pages, blocks, descriptors, or of none of these.
    let ends = [0x200, 0x1000, 0x1a03, 0x1a05, 0x3000, 0x4100, 0x5ff0, 0x7001].map(|offset| FREE + offset);
    check(Waits::Never, 13, &ends);
    check(Waits::Always, 14, &ends);
}
