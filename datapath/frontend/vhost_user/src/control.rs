//! One connection of a front-end: its messages set up memory and queues (vhost-user protocol).
//!
//! A queue runs when it has addresses and a kick descriptor and is enabled. It ends with `GET_VRING_BASE`,
//! when it is disabled, or with the connection. In each case the requests that it has taken are finished and
//! answered first.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::config_space::{self, MOST_BYTES, WRITE_BACK_OFFSET, feature};
use crate::disk::Disk;
use crate::memory::{GuestMemory, MapError, REGIONS, RegionSpec};
use crate::queue::marks::{self, Region, RegionFault};
use crate::queue::{End, QUEUE_SIZE, Queue, RingAddresses, Setup, Signal};

/// The front-end's settings for one queue.
#[derive(Default)]
struct QueueState {
    entries: u16,
    addresses: Option<RingAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<Signal>,
    error: Option<Signal>,
    enabled: bool,
    running: Option<Queue>,
}

/// Sets the close-on-exec flag, which the message layer does not set. Without it, programs that this process
/// starts (qemu-img, a hypervisor) would inherit a machine's memory and queues.
fn close_on_exec(file: &File) -> Result<()> {
    rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC).map_err(|e| Error::ReqHandlerError(e.into()))
}

/// The state of a connection.
pub(crate) struct Control {
    disk: Arc<Disk>,
    features: u64,
    memory: Arc<GuestMemory>,
    /// Where requests in flight are marked, for the next server.
    region: Option<Arc<Region>>,
    queues: Vec<QueueState>,
    /// Whether waiting for the device has taken too long since the server began to stop.
    give_up: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Control {
    pub(crate) fn new(disk: Arc<Disk>, give_up: Box<dyn Fn() -> bool + Send + Sync>) -> Self {
        let queues = (0..disk.limits.queues).map(|_| QueueState::default()).collect();
        let memory = Arc::new(GuestMemory::new(Arc::clone(&disk.addresses)));
        Self { disk, features: 0, memory, region: None, queues, give_up }
    }

    fn queue(&mut self, index: usize) -> Result<&mut QueueState> {
        let count = self.queues.len();
        match self.queues.get_mut(index) {
            Some(queue) => Ok(queue),
            None => {
                let why = format_args!("the front-end uses queue {index}; there are {count}, counted from 0");
                self.disk.faults.warn(&self.disk.name, &why);
                Err(Error::InvalidParam)
            }
        }
    }

    /// Starts a queue that has everything it needs.
    fn start_if_ready(&mut self, index: usize) -> Result<()> {
        let acked = |bit: u64| self.features & bit != 0;
        let (event_idx, indirect) = (acked(feature::EVENT_IDX), acked(feature::INDIRECT));
        // Without the protocol's own features there is no message to enable a queue (vhost-user: ring
        // states).
        let always_enabled = !acked(feature::VHOST_USER_PROTOCOL);
        let (disk, memory, region) = (Arc::clone(&self.disk), Arc::clone(&self.memory), self.region.clone());
        let queue = self.queue(index)?;
        if queue.running.is_some() || !(queue.enabled || always_enabled) {
            return Ok(());
        }
        let (Some(kick), Some(addresses)) = (&queue.kick, queue.addresses) else { return Ok(()) };
        let copy = |signal: &Option<Signal>| signal.as_ref().map(Signal::try_clone).transpose();
        let setup = || -> std::io::Result<Setup> {
            Ok(Setup {
                number: index,
                entries: queue.entries,
                addresses,
                base: queue.base,
                event_idx,
                indirect,
                kick: kick.try_clone()?,
                call: copy(&queue.call)?,
                error: copy(&queue.error)?,
                memory,
                region,
                disk: Arc::clone(&disk),
            })
        };
        match setup().map_err(Into::into).and_then(Queue::start) {
            Ok(running) => queue.running = Some(running),
            Err(error) => {
                disk.faults.warn(&format_args!("{} queue {index}", disk.name), &format_args!("{error}"));
                return Err(Error::InvalidParam);
            }
        }
        Ok(())
    }

    /// Ends a queue when all its requests have been answered, and stores its position. If some are not
    /// answered, there is no position, and the error ends the connection. With a wrong position the front-end
    /// would continue there; without one, it reads the position from the ring. Nothing is lost, because this
    /// happens only if the server stops or the device is closed.
    fn stop(&mut self, index: usize) -> Result<u16> {
        let running = self.queue(index)?.running.take();
        if let Some(running) = running {
            running.stop();
            let End::At(base) = running.wait_end(&*self.give_up) else {
                let why =
                    format!("queue {index} has no final position: some of its requests are not answered");
                return Err(Error::ReqHandlerError(std::io::Error::other(why)));
            };
            self.queue(index)?.base = base;
        }
        Ok(self.queue(index)?.base)
    }

    /// Ends all queues. `false`: the device still has requests and the wait was given up; the queues end by
    /// themselves.
    pub(crate) fn stop_all(&mut self) -> bool {
        let running: Vec<Queue> = self.queues.iter_mut().filter_map(|queue| queue.running.take()).collect();
        for queue in &running {
            queue.stop();
        }
        let mut all = true;
        for queue in running {
            all &= queue.wait_end(&*self.give_up) != End::GivenUp;
        }
        all
    }

    /// Refuses memory that its owner can truncate, or warns about it once.
    fn check_memory(&self, memory: GuestMemory) -> std::result::Result<GuestMemory, MapError> {
        if let Some(spec) = memory.not_lasting() {
            if self.disk.sealed_memory {
                return Err(MapError::NotSealed(spec));
            }
            if !self.disk.warned_of_memory.swap(true, Ordering::Relaxed) {
                let why = format_args!(
                    "the machine's memory lies in a file that cannot be sealed: whoever can truncate it can end this \
                     process; with memory-backend-memfd nobody can"
                );
                self.disk.faults.warn(&self.disk.name, &why);
            }
        }
        Ok(memory)
    }

    fn refuse<T>(&self, error: &RegionFault) -> Result<T> {
        self.disk.faults.warn(&self.disk.name, error);
        Err(Error::InvalidParam)
    }

    fn use_memory(&mut self, memory: std::result::Result<GuestMemory, MapError>) -> Result<()> {
        match memory.and_then(|memory| self.check_memory(memory)) {
            Ok(memory) => self.memory = Arc::new(memory),
            Err(error) => {
                self.disk.faults.warn(&self.disk.name, &error);
                return Err(Error::InvalidParam);
            }
        }
        for queue in self.queues.iter().filter_map(|queue| queue.running.as_ref()) {
            queue.set_memory(Arc::clone(&self.memory), &*self.give_up);
        }
        Ok(())
    }
}

fn spec(region: &VhostUserMemoryRegion) -> RegionSpec {
    RegionSpec {
        guest: region.guest_phys_addr,
        user: region.user_addr,
        len: region.memory_size,
        file_offset: region.mmap_offset,
    }
}

fn index_of(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl VhostUserBackendReqHandlerMut for Control {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        for queue in &mut self.queues {
            *queue = QueueState::default();
        }
        self.features = 0;
        self.region = None;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config_space::features(&self.disk.geometry))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !config_space::features(&self.disk.geometry);
        if unknown != 0 {
            let why = format_args!("the front-end wants features {unknown:#x}, which were not offered");
            self.disk.faults.warn(&self.disk.name, &why);
            return Err(Error::FeatureMismatch);
        }
        self.features = features;
        self.disk.set_flushes(features & (feature::FLUSH | feature::CONFIG_WCE) != 0);
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        files.iter().try_for_each(close_on_exec)?;
        if regions.len() != files.len() {
            return Err(Error::IncorrectFds);
        }
        let none = GuestMemory::new(Arc::clone(&self.disk.addresses));
        if self.queues.iter().all(|queue| queue.running.is_none()) {
            // A front-end may send the same table again whenever a driver starts: then it is not mapped
            // twice.
            self.memory = Arc::new(none.clone());
        }
        let memory = regions
            .iter()
            .zip(&files)
            .try_fold(none, |memory, (region, file)| memory.with(spec(region), file));
        self.use_memory(memory)?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(u64::try_from(REGIONS).unwrap_or(u64::MAX))
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        close_on_exec(&file)?;
        let memory = self.memory.with(spec(region), &file);
        self.use_memory(memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let memory = self.memory.without(spec(region));
        self.use_memory(memory)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let entries = u16::try_from(num).ok().filter(|n| n.is_power_of_two() && *n <= QUEUE_SIZE);
        let queue = self.queue(index_of(index))?;
        let why = match entries {
            Some(entries) if queue.running.is_none() => {
                queue.entries = entries;
                return Ok(());
            }
            Some(_) => format!("cannot change the size of queue {index} while it runs"),
            None => format!(
                "queue {index} cannot have {num} entries: the number must be a power of two, at most {QUEUE_SIZE}"
            ),
        };
        self.disk.faults.warn(&self.disk.name, &why);
        Err(Error::InvalidParam)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        if flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG) {
            return unsupported("logging of changed memory was not offered");
        }
        let queue = self.queue(index_of(index))?;
        if queue.running.is_some() {
            return unsupported("a running queue cannot be moved");
        }
        queue.addresses = Some(RingAddresses { descriptors: descriptor, available, used });
        self.start_if_ready(index_of(index))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        let queue = self.queue(index_of(index))?;
        if queue.running.is_some() {
            return unsupported("the position of a running queue cannot be changed");
        }
        queue.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.stop(index_of(index))?;
        let queue = self.queue(index_of(index))?;
        // The front-end sends all of these again before it starts the queue again.
        queue.kick = None;
        queue.call = None;
        queue.error = None;
        queue.addresses = None;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let queue = self.queue(usize::from(index))?;
        let Some(fd) = fd else {
            return unsupported("queues without a kick descriptor, which are polled, are not supported");
        };
        close_on_exec(&fd)?;
        if queue.running.is_some() {
            return unsupported("the kick descriptor of a running queue cannot be replaced");
        }
        queue.kick = Some(fd.into());
        self.start_if_ready(usize::from(index))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        fd.iter().try_for_each(close_on_exec)?;
        let queue = self.queue(usize::from(index))?;
        queue.call = fd.map(Signal::new);
        if let Some(running) = &queue.running {
            let copy = queue.call.as_ref().map(Signal::try_clone).transpose();
            running.set_call(copy.map_err(Error::ReqHandlerError)?);
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        fd.iter().try_for_each(close_on_exec)?;
        let queue = self.queue(usize::from(index))?;
        queue.error = fd.map(Signal::new);
        if let Some(running) = &queue.running {
            let copy = queue.error.as_ref().map(Signal::try_clone).transpose();
            running.set_error(copy.map_err(Error::ReqHandlerError)?);
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        // The message layer refuses messages whose feature was not acknowledged.
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.disk.limits.queues))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index_of(index))?.enabled = enable;
        if enable {
            return self.start_if_ready(index_of(index));
        }
        self.stop(index_of(index)).map(drop)
    }

    fn get_config(&mut self, offset: u32, bytes: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let end = offset.checked_add(bytes).filter(|end| *end <= MOST_BYTES).ok_or(Error::InvalidParam)?;
        let known = config_space::bytes(&self.disk.geometry, self.disk.limits.queues, self.disk.write_back());
        let mut space = vec![0_u8; usize::try_from(end).map_err(|_| Error::InvalidParam)?];
        for (byte, known) in space.iter_mut().zip(known) {
            *byte = known;
        }
        let start = usize::try_from(offset).map_err(|_| Error::InvalidParam)?;
        space.get(start..).map(<[u8]>::to_vec).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // Front-ends send the whole field or, as QEMU does, only its byte. The offered features decide, not
        // the accepted ones: a driver may write before it runs (virtio 3.1.1), and front-ends report the
        // accepted features only then.
        if let (WRITE_BACK_OFFSET, [value @ (0 | 1)], true) =
            (offset, bytes, self.disk.geometry.volatile_cache)
        {
            self.disk.choose_write_back(*value == 1);
        } else {
            // An error would end the connection, but a guest that writes to a read-only field should keep its
            // disk.
            let len = bytes.len();
            let why =
                format_args!("{len} bytes that the guest wrote at {offset} of its configuration are ignored");
            self.disk.faults.warn(&self.disk.name, &why);
        }
        Ok(())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unsupported("this device is not a graphics card")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unsupported("there are no shared objects")
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let VhostUserInflight { num_queues: queues, queue_size: entries, .. } = *wanted;
        let possible = usize::from(queues) <= self.queues.len();
        match possible.then(|| marks::make(queues, entries)) {
            Some(Ok((file, bytes))) => Ok((VhostUserInflight::new(bytes, 0, queues, entries), file)),
            Some(Err(error)) => self.refuse(&error),
            None => self.refuse(&RegionFault::Shape { queues, entries }),
        }
    }

    fn set_inflight_fd(&mut self, region: &VhostUserInflight, file: File) -> Result<()> {
        close_on_exec(&file)?;
        if self.queues.iter().any(|queue| queue.running.is_some()) {
            return unsupported("the vhost-user inflight region cannot change while queues run");
        }
        let VhostUserInflight { mmap_size, mmap_offset, num_queues: queues, queue_size: entries } = *region;
        match Region::open(&file, (mmap_size, mmap_offset), queues, entries) {
            Ok(region) => self.region = Some(region),
            Err(error) => return self.refuse(&error),
        }
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unsupported("migration was not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("migration was not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("shared memory regions were not offered")
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        unsupported("logging of changed memory was not offered")
    }
}
