//! A driver that measures any vhost-user-blk server: the VDI mix (4 KiB, 80 % writes, 80 % random) on one queue.
//!
//! `vdi_mix SOCKET DEPTH SECONDS [SPAN [PID [REQUEST [BUFFER]]]]` prints one line: requests a second, mean
//! and 99th percentile of the latency in microseconds, and, given the server's process id, its processor time
//! per request. The span (1G) is first written once, so that all of it has data. A request has 4K or the
//! given length, in one buffer or in buffers of the given length, of which the last one has the lowest
//! address.
#![expect(unsafe_code, reason = "buffers are shared with the server by address, as a guest does")]

use std::error::Error;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use headwater_block::size;
use headwater_testkit::Rng;
use rustix::mm::{MapFlags, ProtFlags};
use virtio_driver::{
    QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags, iovec,
};

const FILL_BYTES: usize = 128 << 10;
const QUEUE_SIZE: u16 = 256;

struct Driver {
    queue: VirtioBlkQueue<'static, usize>,
    notifier: Box<dyn QueueNotifier>,
    memory: *mut u8,
    buffers: Vec<iovec>,
    _transport: Box<VirtioBlkTransport>,
}

impl Driver {
    fn connect(path: &str, memory_bytes: usize) -> Result<Self, Box<dyn Error>> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(path, features.bits())?);
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, QUEUE_SIZE)?;
        let file: File = rustix::fs::memfd_create("buffers", rustix::fs::MemfdFlags::CLOEXEC)?.into();
        file.set_len(memory_bytes as u64)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice, never unmapped.
        let memory =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), memory_bytes, protection, flags, &file, 0)? };
        transport.map_mem_region(memory as usize, memory_bytes, file.as_raw_fd(), 0)?;
        let mut queue = queues.pop().ok_or("no queue")?;
        // The driver polls; interrupts would add the client's costs to the result.
        queue.set_used_notif_enabled(false);
        let notifier = transport.get_submission_notifier(0);
        Ok(Self { queue, notifier, memory: memory.cast(), buffers: Vec::new(), _transport: transport })
    }

    fn add(
        &mut self,
        write: bool,
        offset: u64,
        slot: usize,
        (bytes, buffer_bytes): (usize, usize),
    ) -> Result<(), Box<dyn Error>> {
        self.buffers.clear();
        for at in (0..bytes).step_by(buffer_bytes) {
            let (from, iov_len) = (bytes.saturating_sub(at + buffer_bytes), buffer_bytes.min(bytes - at));
            // SAFETY: each slot has its own bytes in the mapping.
            let iov_base = unsafe { self.memory.add(slot * FILL_BYTES + from) }.cast();
            self.buffers.push(iovec { iov_base, iov_len });
        }
        let (buffers, count) = (self.buffers.as_ptr(), self.buffers.len());
        // SAFETY: as above, and no other request uses the slot.
        unsafe {
            match write {
                true => self.queue.writev(offset, buffers, count, slot)?,
                false => self.queue.readv(offset, buffers, count, slot)?,
            }
        }
        Ok(())
    }

    fn kick(&mut self) -> Result<(), Box<dyn Error>> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify()?;
        }
        Ok(())
    }

    /// Waits for at least one completion, and adds the completed slots to `slots`.
    fn wait(&mut self, slots: &mut Vec<usize>) -> Result<(), Box<dyn Error>> {
        while slots.is_empty() {
            for completion in self.queue.completions() {
                if completion.ret != 0 {
                    return Err(format!("a request failed: {}", completion.ret).into());
                }
                slots.push(completion.context);
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn fill(&mut self, span: u64, rng: &mut Rng) -> Result<(), Box<dyn Error>> {
        let mut free: Vec<usize> = (0..8).collect();
        for at in (0..span).step_by(FILL_BYTES) {
            if free.is_empty() {
                self.wait(&mut free)?;
            }
            let slot = free.pop().ok_or("no slot")?;
            for word in 0..FILL_BYTES / 8 {
                // SAFETY: inside of the slot, which no request uses now.
                unsafe { self.memory.add(slot * FILL_BYTES).cast::<u64>().add(word).write(rng.next_u64()) };
            }
            self.add(true, at, slot, (FILL_BYTES, FILL_BYTES))?;
            self.kick()?;
        }
        let mut pending = 8 - free.len();
        while pending > 0 {
            let mut done = Vec::new();
            self.wait(&mut done)?;
            pending -= done.len();
        }
        Ok(())
    }
}

fn processor_seconds(pid: Option<&str>) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid?)).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, depth, seconds, rest @ ..] = &arguments[..] else {
        return Err("usage: vdi_mix SOCKET DEPTH SECONDS [SPAN [PID [REQUEST [BUFFER]]]]".into());
    };
    let (depth, seconds): (usize, u64) = (depth.parse()?, seconds.parse()?);
    let span = size::parse(rest.first().map_or("1G", String::as_str))?;
    let pid = rest.get(1).map(String::as_str);
    let request = size::parse(rest.get(2).map_or("4K", String::as_str))?;
    let request_bytes = usize::try_from(request).ok().filter(|bytes| (1..=FILL_BYTES).contains(bytes));
    let request_bytes = request_bytes.ok_or("a request has at most 128K")?;
    let buffer_bytes = rest.get(3).map_or(Ok(request), |buffer| size::parse(buffer))?;
    let buffer_bytes = usize::try_from(buffer_bytes).ok().filter(|bytes| *bytes > 0);
    let lengths = (request_bytes, buffer_bytes.ok_or("a buffer has at least a byte")?);
    // The header and the status have descriptors, too.
    let deepest = usize::from(QUEUE_SIZE) / (lengths.0.div_ceil(lengths.1) + 2);
    if depth == 0 || depth > deepest {
        return Err(format!("a depth of {depth}; possible are 1 to {deepest}").into());
    }
    let mut driver = Driver::connect(path, depth.max(8) * FILL_BYTES)?;
    let mut rng = Rng::new(1);
    driver.fill(span, &mut rng)?;

    let requests = span / request;
    let mut next = 0;
    let mut started = vec![Instant::now(); depth];
    let mut latencies_ns: Vec<u32> = Vec::with_capacity(1 << 25);
    let mut free: Vec<usize> = (0..depth).collect();
    let processor = processor_seconds(pid);
    let begin = Instant::now();
    let end = begin + Duration::from_secs(seconds);
    let mut now = begin;
    while now < end {
        for slot in free.drain(..) {
            let roll = rng.next_u64();
            next = if roll % 5 < 4 { rng.next_u64() % requests } else { (next + 1) % requests };
            started[slot] = now;
            driver.add(roll / 5 % 5 < 4, next * request, slot, lengths)?;
        }
        driver.kick()?;
        driver.wait(&mut free)?;
        now = Instant::now();
        for slot in &free {
            latencies_ns.push(u32::try_from((now - started[*slot]).as_nanos()).unwrap_or(u32::MAX));
        }
    }
    let elapsed = begin.elapsed().as_secs_f64();
    let count = latencies_ns.len();
    let spent = processor_seconds(pid).zip(processor).map(|(after, before)| after - before);
    let mean = latencies_ns.iter().map(|ns| u64::from(*ns)).sum::<u64>() as f64 / count as f64 / 1e3;
    latencies_ns.sort_unstable();
    let p99 = f64::from(latencies_ns[count * 99 / 100]) / 1e3;
    print!("depth {depth}: {:.0} requests/s, mean {mean:.2} us, p99 {p99:.2} us", count as f64 / elapsed);
    match spent {
        Some(spent) => println!(", {:.2} us of the server's processors each", spent * 1e6 / count as f64),
        None => println!(),
    }
    Ok(())
}
