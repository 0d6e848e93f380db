//! Opens machines' disks: a volume over a version of an image, served on a unix socket by vhost-user-blk or NBD.
//!
//! [`Volumes`] is used by the disk process of `headwater serve`, and by `headwater run` in its own process. The service decides which
//! version and which write cache a disk has. The parts of an open disk are in [`served`]; what a crash of this process leaves to the next
//! one is in [`in_keeper`]. In this module "kept" means: of a persistent disk, which outlives its machine's runs.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use headwater_api::platform::Firmware;
use headwater_api::{CacheContents, CacheMode, CacheSettings, HostRam, ImageVersion, ProblemKind, Sample};
use headwater_block::{BLOCK_BYTES, Device, Geometry, IoError, IoErrorKind, size};
use headwater_image::DiskCache;
use headwater_service::backend::{
    BackendError, Disk, DiskRequest, Disks, FrozenDisk, PersistentDiskRef, PersistentDiskRequest, TaskControl,
};
use headwater_store::{Pin, Store};
use headwater_volume::{LittleSpace, Volume, VolumeOptions};
use headwater_writecache::overflow::{BRIEF_NAME, check_directory};
use headwater_writecache::pressure::SystemPressure;
use headwater_writecache::{Handover, Host, MAX_WEIGHT, MIN_DISK_BYTES, MIN_RAM_BYTES};
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use self::in_keeper::DiskInKeeper;
use self::recordings::Recording;
use self::scratch::Scratch;
use self::served::{PersistentUse, ServedParts, ServedVolume, Server};
use crate::adapters::contents::{self, ScanPermit, Scans};
use crate::adapters::frozen::{FrozenVolume, or_discard};
use crate::adapters::images::{check_bootable, check_signed, hash_of, image_failed};
use crate::adapters::persistent_disks::{self, PersistentDiskFiles};
use crate::adapters::release::Released;
use crate::adapters::snapshot_leases::{Reader, SnapshotLeases};
use crate::adapters::totals::Totals;
use crate::caches::{CacheArgs, check_share};
use crate::disk_process::{Keeper, LeftCaches, LeftDisk};
use crate::streaming::{DiskState, StreamArgs, Streamed, Streaming};
use crate::traces::{TraceOutbox, Traces};

/// The directories for files of disks.
#[derive(Clone, Debug)]
pub struct Directories {
    /// Overflow files, and the files of persistent disks.
    pub overflow: PathBuf,
    /// The keys of persistent disks.
    pub keys: PathBuf,
    /// Recordings of the requests of machines.
    pub recordings: PathBuf,
}

/// Opens the disks of one data directory.
pub struct Volumes {
    store: Arc<dyn Store>,
    files: PersistentDiskFiles,
    recordings: PathBuf,
    streaming: Arc<Streaming>,
    host: Arc<Host>,
    /// The memory limit for all write caches together.
    ram_bytes: u64,
    caches: CacheArgs,
    readable: Arc<Readable>,
    totals: Arc<Totals>,
    /// The keeper, which holds the memory of write caches so that disks outlive this process. `None` in `headwater run`.
    keeper: Option<Arc<Keeper>>,
}

/// The disks that external readers can use.
#[derive(Default)]
struct Readable {
    /// The disks of machines that are on, or were; by name.
    on: Mutex<HashMap<String, Weak<ServedVolume>>>,
    /// Persistent disks whose machines are off.
    kept: Mutex<HashMap<Uuid, SnapshotLeases>>,
    /// The permits for scans of write caches, of all machines.
    scans: Arc<Scans>,
    /// All disks are left to the next process, so that none is served any more. Locked for reading from the moment at which the keeper
    /// may not have a disk until the disk is in `on`: a hand-over in between would leave it to nobody.
    handed_over: RwLock<bool>,
}

impl Readable {
    /// The disks of machines that are on, or were.
    fn on(&self) -> Vec<Arc<ServedVolume>> {
        self.on.lock().values().filter_map(Weak::upgrade).collect()
    }

    fn of_machine(&self, machine: &str) -> Option<Arc<ServedVolume>> {
        let served = self.on.lock().get(machine).and_then(Weak::upgrade)?;
        served.parts.lock().is_some().then(|| Arc::clone(&served))
    }

    fn of_kept(&self, id: Uuid) -> SnapshotLeases {
        self.kept.lock().entry(id).or_default().clone()
    }
}

impl Volumes {
    /// Disks over the images of `store`; chunks of other hosts are kept on `disk`. Boot traces go to `outbox` if another process
    /// writes the store.
    pub fn new(
        store: Arc<dyn Store>,
        directories: Directories,
        caches: CacheArgs,
        stream: &StreamArgs,
        disk: Option<Arc<DiskCache>>,
        outbox: Option<Arc<TraceOutbox>>,
    ) -> Result<Self, BackendError> {
        let store = store.retrying().unwrap_or(store);
        let ram_bytes = caches.ram_bytes().map_err(|why| {
            BackendError::new(ProblemKind::Invalid, why).advise("give a smaller --cache-ram")
        })?;
        let streaming = Arc::new(Streaming::new(store.clone(), stream, disk, None, outbox));
        let host = Host::start(ram_bytes).map_err(|e| BackendError::new(ProblemKind::Failed, e))?;
        let files = PersistentDiskFiles::new(directories.overflow, directories.keys);
        let (host, readable, totals) = (Arc::new(host), Arc::default(), Arc::default());
        let recordings = directories.recordings;
        let keeper = None;
        Ok(Self { store, files, recordings, streaming, host, ram_bytes, caches, readable, totals, keeper })
    }

    /// The same, but disks outlive this process by means of a keeper.
    pub fn kept_by(self, keeper: Arc<Keeper>) -> Self {
        Self { keeper: Some(keeper), ..self }
    }

    /// Serves a disk that the disk process before this one left. Blocks.
    pub fn recover(&self, left: LeftDisk) -> Result<Arc<dyn Disk>, BackendError> {
        let LeftDisk { mut request, caches } = left;
        request.goes_on = true;
        self.opener().serve(request, Some(caches))
    }

    /// The geometry of the disk of a machine that is on, for a reader outside.
    pub fn geometry_of(&self, machine: &str) -> Option<Geometry> {
        let geometry = self.readable.of_machine(machine)?.volume.geometry();
        Some(Geometry { read_only: true, volatile_cache: false, ..geometry })
    }

    /// The geometry of a disk over a version, for a reader outside.
    pub fn geometry_over(&self, version: &ImageVersion) -> Result<Geometry, BackendError> {
        let outline = headwater_image::outline_of(&*self.store, hash_of(version)?).map_err(image_failed)?;
        Ok(Geometry {
            size_bytes: version.size_bytes,
            logical_block_bytes: outline.sector_bytes(),
            physical_block_bytes: BLOCK_BYTES,
            read_only: true,
            volatile_cache: false,
        })
    }

    /// Opens a snapshot of the disk of a machine that is on: a new one, or that of other readers. `None`: the
    /// machine is off.
    pub fn open_reader(&self, machine: &str) -> Option<Result<Reader, BackendError>> {
        let served = self.readable.of_machine(machine)?;
        Some(served.open_reader())
    }

    /// Whether a persistent disk exists or was used. If its files are lost, opening it reports that.
    pub fn is_begun(&self, kept: PersistentDiskRef) -> bool {
        kept.is_begun || self.files.is_begun(kept.id)
    }

    /// Opens a persistent disk whose machine is off, in its last state. The readers lose it when the machine starts.
    pub fn read_persistent(&self, request: &PersistentDiskRequest) -> Result<Reader, BackendError> {
        let opener = self.opener();
        self.readable.of_kept(request.kept.id).borrow(|| opener.left(request))
    }
}

impl Volumes {
    /// Freezes the disk of a machine that is on.
    pub fn freeze(&self, machine: &str) -> Result<FrozenVolume, BackendError> {
        let served = self
            .readable
            .of_machine(machine)
            .ok_or_else(|| BackendError::new(ProblemKind::Conflict, "the machine is being switched off"))?;
        served.freeze_alone()
    }

    /// Opens a persistent disk that no machine uses, frozen. Blocks.
    pub fn freeze_persistent(&self, request: PersistentDiskRequest) -> Result<FrozenVolume, BackendError> {
        self.opener().freeze_persistent(request)
    }

    /// The recorder of boot traces.
    pub fn traces(&self) -> Arc<Traces> {
        Arc::clone(self.streaming.traces())
    }

    /// Why reads of images wait, for people. `None`: none waits.
    pub fn reads_wait(&self) -> Option<String> {
        self.streaming.trouble()
    }

    /// Saves persistent disks, and fails if the disk of a machine that is on cannot be handed over. Blocks.
    pub fn can_hand_over(&self) -> Result<(), BackendError> {
        let on = self.readable.on();
        std::thread::scope(|scope| {
            let checks: Vec<_> =
                on.iter().map(|served| scope.spawn(move || served.can_hand_over())).collect();
            let broke_off = |_| BackendError::new(ProblemKind::Failed, "the check of a disk broke off");
            checks.into_iter().try_for_each(|check| check.join().map_err(broke_off)?)
        })
    }

    /// Stops to serve the disks of machines that are on, and leaves them to the next process. Blocks, also if another thread does this.
    pub fn hand_over(&self) {
        let mut handed_over = self.readable.handed_over.write();
        *handed_over = true;
        let on = self.readable.on();
        std::thread::scope(|scope| {
            for served in &on {
                scope.spawn(|| {
                    if let Err(error) = served.hand_over() {
                        tracing::error!(machine = %served.machine, "its disk is not handed over: {error}");
                    }
                });
            }
        });
    }

    /// Whether the disks are left to the next process. Blocks while they are being handed over.
    pub fn is_handed_over(&self) -> bool {
        *self.readable.handed_over.read()
    }

    /// Fails reads that wait for the store, and later ones: nobody needs them any more.
    pub fn close_store(&self) {
        self.streaming.close();
    }
}

#[async_trait]
impl Disks for Volumes {
    async fn check(&self, cache: &CacheSettings) -> Result<(), BackendError> {
        self.refuse(cache, None)
    }

    async fn check_change(&self, before: &CacheSettings, after: &CacheSettings) -> Result<(), BackendError> {
        self.refuse(after, Some(before))
    }

    async fn check_space(
        &self,
        cache: &CacheSettings,
        kept: Option<PersistentDiskRef>,
        scratch_bytes: u64,
    ) -> Result<(), BackendError> {
        let (files, mode, limit_bytes) = (self.files.clone(), cache.mode, cache.disk_bytes);
        blocking("determine how much space is free", move || {
            let name = kept.map(|kept| persistent_disks::name(kept.id));
            if mode != CacheMode::Ram {
                check_directory(&files.cache_dir, name.as_deref(), limit_bytes)
                    .map_err(|e| BackendError::new(kind_of(&e), e.to_string()))?;
            }
            scratch::check_space(&files.cache_dir, scratch_bytes)
        })
        .await
    }

    async fn open(&self, request: DiskRequest) -> Result<Arc<dyn Disk>, BackendError> {
        let mut cache = request.cache;
        if request.goes_on && cache.disk_bytes > 0 {
            cache.disk_bytes = at_least(cache.disk_bytes);
        }
        self.check(&cache).await?;
        let opener = self.opener();
        blocking("open the disk", move || opener.serve(request, None)).await
    }

    async fn open_persistent(
        &self,
        request: PersistentDiskRequest,
    ) -> Result<Box<dyn FrozenDisk>, BackendError> {
        let opener = self.opener();
        blocking("open the disk", move || {
            Ok(Box::new(opener.freeze_persistent(request)?) as Box<dyn FrozenDisk>)
        })
        .await
    }

    async fn persistent_contents(
        &self,
        request: PersistentDiskRequest,
        control: Arc<TaskControl>,
    ) -> Result<CacheContents, BackendError> {
        let permit = ScanPermit::take(&self.readable.scans)?;
        let (readable, opener) = (self.readable.of_kept(request.kept.id), self.opener());
        blocking("scan the write cache", move || {
            let reader = readable.borrow_for_scan(|| opener.left(&request))?;
            contents::scan(reader, permit, control)
        })
        .await
    }

    async fn discard(&self, id: Uuid) -> Result<(), BackendError> {
        let (files, readable) = (self.files.clone(), Arc::clone(&self.readable));
        blocking("remove a disk", move || {
            let snapshot_leases = readable.of_kept(id);
            let taken = snapshot_leases.take_back();
            files.discard(id)?;
            drop(taken);
            readable.kept.lock().remove(&id);
            Ok(())
        })
        .await
    }

    fn host_ram(&self) -> HostRam {
        let host = self.host.snapshot();
        HostRam {
            configured_bytes: host.configured_limit_bytes,
            limit_bytes: host.limit_bytes,
            used_bytes: host.used_bytes,
            pressure_shrinks: host.pressure_shrinks,
        }
    }

    fn metrics(&self) -> Vec<Sample> {
        let mut samples = super::metrics::host(&self.host.snapshot(), &self.streaming.chunks().counters());
        samples.extend(super::metrics::streaming(&self.streaming.counters()));
        samples.extend(self.totals.samples());
        samples
    }

    async fn is_there(&self, id: Uuid) -> Result<bool, BackendError> {
        let files = self.files.clone();
        blocking("look for a persistent disk", move || Ok(files.is_begun(id))).await
    }

    async fn persistent_keys(&self) -> Result<Vec<PathBuf>, BackendError> {
        let files = self.files.clone();
        blocking("look for persistent disks", move || files.settled_keys()).await
    }

    async fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError> {
        let (files, keep) = (self.files.clone(), keep.to_vec());
        blocking("clean up the overflow directory", move || {
            let mut removed = sweep(&files.cache_dir)?;
            removed.extend(files.sweep(&keep)?);
            Ok(removed)
        })
        .await
    }
}

impl Volumes {
    /// Checks that this host can provide a write cache. `before`: the earlier limits, which are not checked again.
    fn refuse(&self, cache: &CacheSettings, before: Option<&CacheSettings>) -> Result<(), BackendError> {
        let is_new =
            |limit: fn(&CacheSettings) -> u64| before.is_none_or(|before| limit(before) != limit(cache));
        let (is_ram_new, is_disk_new) = (is_new(|cache| cache.ram_bytes), is_new(|cache| cache.disk_bytes));
        let invalid = |message: String| Err(BackendError::new(ProblemKind::Invalid, message));
        if is_ram_new && cache.mode != CacheMode::Disk && cache.ram_bytes < MIN_RAM_BYTES {
            return invalid(format!(
                "a write cache of {} of memory is too small; it takes {} or more",
                size::format(cache.ram_bytes),
                size::format(MIN_RAM_BYTES)
            ));
        }
        if is_ram_new && cache.mode != CacheMode::Disk {
            check_share(cache.ram_bytes, self.ram_bytes).or_else(invalid)?;
        }
        if is_disk_new && cache.mode != CacheMode::Ram && cache.disk_bytes == 0 {
            return invalid(format!("the cache mode '{}' needs disk space, but its limit is 0", cache.mode));
        }
        if is_disk_new && cache.mode != CacheMode::Ram && cache.disk_bytes < MIN_DISK_BYTES {
            return invalid(format!(
                "a write cache of {} of disk is too small; it takes {} or more",
                size::format(cache.disk_bytes),
                size::format(MIN_DISK_BYTES)
            ));
        }
        if cache.persistent && cache.mode == CacheMode::Ram {
            return invalid(format!(
                "the cache mode '{}' keeps nothing on disk, so it cannot be persistent",
                cache.mode
            ));
        }
        if !(1..=MAX_WEIGHT).contains(&cache.weight) {
            return invalid(format!(
                "{} is not a valid weight of a write cache; use 1 to {MAX_WEIGHT}",
                cache.weight
            ));
        }
        Ok(())
    }

    fn opener(&self) -> Opener {
        Opener {
            store: self.store.clone(),
            files: self.files.clone(),
            recordings: self.recordings.clone(),
            streaming: Arc::clone(&self.streaming),
            host: Arc::clone(&self.host),
            caches: self.caches.clone(),
            readable: Arc::clone(&self.readable),
            totals: Arc::clone(&self.totals),
            keeper: self.keeper.clone(),
        }
    }
}

/// An open volume.
struct Opened {
    volume: Arc<Volume>,
    /// Keeps the version, and runs its background work.
    pin: Pin,
    /// Keeps the version only.
    version: Arc<Pin>,
    image: Weak<Streamed>,
}

/// The options for opening a disk.
struct Opening {
    kept: Option<PersistentDiskRef>,
    little_space: LittleSpace,
    /// The firmware of the machine. `None`: no machine boots from the disk.
    firmware: Option<Firmware>,
    /// Whether that runs signed loaders only.
    secure_boot: bool,
    /// What another process left of the disk.
    left: Option<Handover>,
}

impl Opening {
    /// Of a persistent disk from which no machine boots.
    fn unbooted(kept: PersistentDiskRef) -> Self {
        let little_space = LittleSpace::Accepted;
        Self { kept: Some(kept), little_space, firmware: None, secure_boot: false, left: None }
    }
}

/// Opens disks on a thread that may block.
struct Opener {
    store: Arc<dyn Store>,
    files: PersistentDiskFiles,
    recordings: PathBuf,
    streaming: Arc<Streaming>,
    host: Arc<Host>,
    caches: CacheArgs,
    readable: Arc<Readable>,
    totals: Arc<Totals>,
    keeper: Option<Arc<Keeper>>,
}

impl Opener {
    /// Like [`Opener::open_volume`], but first takes a persistent disk back from its readers.
    fn volume(
        &self,
        name: &str,
        version: &ImageVersion,
        cache: &CacheSettings,
        open: Opening,
    ) -> Result<Opened, BackendError> {
        let kept = open.kept;
        let snapshot_leases = kept.map(|kept| self.readable.of_kept(kept.id));
        // Readers are kept away until the disk is open here, because a new reader would open it first.
        let taken = snapshot_leases.as_ref().map(SnapshotLeases::take_back);
        if let (Some(kept), Some(taken)) = (kept, &taken)
            && taken.readers > 0
        {
            tracing::warn!(disk = %kept.id, readers = taken.readers, "a persistent disk is needed: the snapshot that NBD clients read has ended");
        }
        self.open_volume(name, version, cache, open)
    }

    fn open_volume(
        &self,
        name: &str,
        version: &ImageVersion,
        cache: &CacheSettings,
        open: Opening,
    ) -> Result<Opened, BackendError> {
        let Opening { kept, little_space, firmware, secure_boot, left } = open;
        let manifest = hash_of(version)?;
        // First, so that the version cannot be removed between here and the end of the disk.
        let pinned = self.streaming.pin(manifest).map_err(image_failed)?;
        let pinned = Arc::new(Pin::new(Released::new(pinned)));
        // One that is there may have run also where that could not be noted.
        let is_used = kept.is_some_and(|kept| kept.is_begun || self.files.is_begun(kept.id));
        let above = if is_used || left.is_some() { DiskState::Written } else { DiskState::Empty };
        let streamed = self.streaming.open(manifest, above).map_err(image_failed)?;
        if let Some(firmware) = firmware {
            check_bootable(version, streamed.reader.outline(), firmware)?;
        }
        // A machine may have written another loader to its disk.
        if secure_boot && !is_used && left.is_none() {
            check_signed(version, &streamed.reader)?;
        }
        let mut options = VolumeOptions {
            name: name.to_owned(),
            base: streamed.reader.clone(),
            mode: volume_mode(cache.mode),
            ram_bytes: cache.ram_bytes,
            weight: cache.weight,
            buffering: self.caches.writing.buffering,
            little_space,
            disk_bytes: cache.disk_bytes,
            cache_dir: self.files.cache_dir.clone(),
            pause_limit: self.caches.writing.pause_limit(),
            persistent: None,
        };
        let volume = match kept {
            Some(kept) => self.files.open(kept, manifest, |persistent| {
                options.persistent = Some(persistent);
                Volume::open(&options, &self.host).map_err(volume_failed)
            })?,
            None => self.ephemeral(&options, left, volume_failed)?,
        };
        let streamed = Arc::new(streamed);
        let image = Arc::downgrade(&streamed);
        // What is done in the background for the version ends with its pin.
        let pin = Pin::new((Arc::clone(&pinned), streamed));
        Ok(Opened { volume, pin, version: pinned, image })
    }

    /// A volume that no process has when this one ends and there is no keeper: a new one, or the one that another process left.
    fn ephemeral(
        &self,
        options: &VolumeOptions,
        left: Option<Handover>,
        failed: impl Fn(IoError) -> BackendError,
    ) -> Result<Arc<Volume>, BackendError> {
        if let Some(left) = left {
            return Volume::recover(left, options, &self.host).map_err(failed);
        }
        let no_memory = |e| BackendError::from_io("cannot make the memory of a write cache", e);
        let file = self.keeper.as_ref().map(|keeper| keeper.memory_file()).transpose().map_err(no_memory)?;
        let opened = match file.flatten() {
            Some(file) => Volume::open_in(file, options, &self.host),
            None => Volume::open(options, &self.host),
        };
        opened.map_err(failed)
    }

    /// A persistent disk whose machine is off, as it was left. The caller has the lock of its views.
    fn left(&self, request: &PersistentDiskRequest) -> Result<FrozenVolume, BackendError> {
        // The disk may have been discarded since the caller's check, or never begun; a discard waits for this lock.
        // Only its machine may begin a disk, because a missing disk would otherwise be replaced by an empty one.
        if !self.files.is_begun(request.kept.id) {
            let message = "the persistent disk was discarded, or its machine has not created it yet";
            return Err(BackendError::new(ProblemKind::Conflict, message));
        }
        let Opened { volume, pin, .. } = self.open_volume(
            &request.kept.id.to_string(),
            &request.version,
            &request.cache,
            Opening::unbooted(request.kept),
        )?;
        FrozenVolume::of_nobody(&self.store, request.version.clone(), volume, pin)
    }

    /// Opens a persistent disk that no machine uses, frozen.
    fn freeze_persistent(&self, request: PersistentDiskRequest) -> Result<FrozenVolume, BackendError> {
        if self.files.is_incomplete(request.kept.id) {
            let message = "the machine's last writes may be missing on its persistent disk: the disk process or the host ended while the machine \
                           used it, or the host's disk failed or was full when they were saved";
            return Err(BackendError::new(ProblemKind::Conflict, message)
                .advise("start the machine, check its files, and stop it: when it has stopped with all writes saved, a version can be made of its disk"));
        }
        let snapshot_leases = self.readable.of_kept(request.kept.id);
        // Until it is open here, as below.
        let _unread = snapshot_leases.keep_unread()?;
        // Checked with that lock, because a discard waits for it. Only its machine may begin a disk: a disk that a seal
        // began would tie the machine to the version of an aborted first start.
        if !request.kept.is_begun && !self.files.is_begun(request.kept.id) {
            let advice = or_discard("start the machine first", &request.version.image, request.is_edit);
            let message = "the machine has not created its persistent disk yet";
            return Err(BackendError::new(ProblemKind::Conflict, message).advise(advice));
        }
        let Opened { volume, pin, .. } = self.open_volume(
            &request.kept.id.to_string(),
            &request.version,
            &request.cache,
            Opening::unbooted(request.kept),
        )?;
        FrozenVolume::of_nobody(&self.store, request.version, volume, pin)
    }

    /// Serves a disk on the machine's socket. A persistent disk is marked as used first.
    fn bind(
        &self,
        request: &DiskRequest,
        socket: &Path,
        device: Arc<dyn Device>,
        is_recovered: bool,
    ) -> Result<(Server, Option<PersistentUse>), BackendError> {
        let begin = |kept: PersistentDiskRef| PersistentUse::begin(&self.files, kept.id, &request.machine);
        let kept = request.kept.map(begin).transpose()?;
        let serial = headwater_qemu::disk_serial(request.uuid);
        match Server::bind(request, socket, serial, device, is_recovered) {
            Ok(server) => Ok((server, kept)),
            Err(error) => {
                // Without a server nobody has written, so that nothing can be lost.
                let _ = kept.map(|kept| kept.end(&self.files, Ok(()), false));
                Err(error)
            }
        }
    }

    /// Opens a machine's disk and serves it: a new one, or the one that another process `left`.
    fn serve(self, request: DiskRequest, left: Option<LeftCaches>) -> Result<Arc<dyn Disk>, BackendError> {
        let is_recovered = left.is_some();
        let LeftCaches { disk: left, scratch: left_scratch } = left.unwrap_or_default();
        let little_space = if request.goes_on { LittleSpace::Logged } else { LittleSpace::Refused };
        if little_space == LittleSpace::Refused && request.cache.mode != CacheMode::Ram {
            // Opening the disk would fail with the same error; this adds advice for the machine.
            let name = request.kept.map(|kept| persistent_disks::name(kept.id));
            check_directory(&self.files.cache_dir, name.as_deref(), request.cache.disk_bytes)
                .map_err(|e| volume_failed(e).advise(lower_limit(&request.machine)))?;
        }
        let (firmware, secure_boot) = (Some(request.firmware), request.secure_boot);
        let open = Opening { kept: request.kept, little_space, firmware, secure_boot, left };
        let Opened { volume, pin, version, image } =
            self.volume(&request.machine, &request.version, &request.cache, open)?;
        let socket = request.run_dir.join("disk.sock");
        remove_socket(&socket)?;
        let begin = || recordings::begin(&self.recordings, &request.machine, &volume, &image);
        if request.is_recorded && is_recovered {
            tracing::warn!(machine = %request.machine, "the recording of the machine's requests has ended, because another disk process serves its disk now");
        }
        let recording = (request.is_recorded && !is_recovered).then(begin).transpose();
        // Another process may still recover what this one cannot serve.
        let forget = |volume: &Volume| if is_recovered { volume.close() } else { forget(volume) };
        let recording = recording.inspect_err(|_| forget(&volume))?;
        let device = recording.as_ref().map_or_else(|| volume.clone() as Arc<dyn Device>, Recording::device);
        let scratch = Scratch::open(&self, &request, little_space, is_recovered, left_scratch)
            .inspect_err(|_| forget(&volume))?;
        // Another process may still recover the disk, so its memory and the keeper's part stay then.
        let give_up = |scratch: Option<Scratch>| {
            forget(&volume);
            match scratch {
                Some(scratch) if is_recovered => {
                    scratch.stop();
                    scratch.volume.close();
                }
                Some(scratch) => scratch.close(&self.totals),
                None => {}
            }
        };
        let handed_over = self.readable.handed_over.read();
        if *handed_over {
            give_up(scratch);
            let message = "the disk process is handing its disks over to the next one";
            return Err(BackendError::new(ProblemKind::Unavailable, message).advise("try again"));
        }
        // Before the machine can use it.
        let caches = in_keeper::caches(&volume, scratch.as_ref());
        let in_keeper = DiskInKeeper::begin(self.keeper.as_ref(), &request, caches, is_recovered);
        let served = self.bind(&request, &socket, device, is_recovered).inspect_err(|_| match is_recovered {
            true => in_keeper.give_back(in_keeper::caches(&volume, scratch.as_ref())),
            false => in_keeper.end(),
        });
        let (server, kept) = match served {
            Ok(served) => served,
            Err(error) => {
                give_up(scratch);
                return Err(error);
            }
        };
        self.totals.opened(&volume);
        let served = Arc::new(ServedVolume {
            machine: request.machine.clone(),
            mode: request.cache.mode,
            transport: request.transport,
            files: self.files,
            kept,
            failing: Mutex::default(),
            store: self.store,
            below: request.version,
            socket,
            volume,
            image,
            snapshot_leases: SnapshotLeases::default(),
            totals: self.totals,
            in_keeper: Arc::new(in_keeper),
            scans: Arc::clone(&self.readable.scans),
            parts: Arc::new(Mutex::new(Some(ServedParts { server, recording, scratch, pin, version }))),
            closing: Arc::default(),
        });
        let mut on = self.readable.on.lock();
        on.retain(|_, disk| disk.strong_count() > 0);
        on.insert(request.machine, Arc::downgrade(&served));
        drop((on, handed_over));
        Ok(served)
    }
}

/// Removes a socket of an earlier process of this data directory. The lock shows that no other process uses it now.
fn remove_socket(socket: &Path) -> Result<(), BackendError> {
    if !socket.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
        return Ok(());
    }
    std::fs::remove_file(socket)
        .map_err(|e| BackendError::from_io(format!("cannot remove {}", socket.display()), e))
}

/// Closes a volume that no machine uses.
fn forget(volume: &Volume) {
    volume.end();
    volume.close();
}

/// Overflow files have no name but for a moment: one that has was left by something that died in it. All else is somebody's own.
fn sweep(dir: &Path) -> Result<Vec<String>, BackendError> {
    let failed = |e| BackendError::from_io(format!("cannot clean up {}", dir.display()), e);
    let mut removed = Vec::new();
    if std::fs::symlink_metadata(dir).map_err(failed)?.is_symlink() {
        // A link may lead to a directory where other daemons create their overflow files at this moment.
        return Ok(removed);
    }
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(BRIEF_NAME.as_bytes());
        if is_ours && entry.file_type().map_err(failed)?.is_file() {
            std::fs::remove_file(entry.path()).map_err(failed)?;
            removed.push(format!(
                "the overflow file {} that an earlier daemon left; no machine uses it",
                entry.path().display()
            ));
        }
    }
    Ok(removed)
}

fn kind_of(error: &IoError) -> ProblemKind {
    match error.kind() {
        IoErrorKind::Invalid => ProblemKind::Invalid,
        IoErrorKind::NoSpace => ProblemKind::NoSpace,
        IoErrorKind::Corrupt => ProblemKind::Damaged,
        _ => ProblemKind::Failed,
    }
}

/// The disk limit of a machine. An earlier release may have allowed smaller ones.
fn at_least(disk_bytes: u64) -> u64 {
    disk_bytes.max(MIN_DISK_BYTES)
}

fn lower_limit(machine: &str) -> String {
    format!("'headwater machine set {machine} --disk SIZE' gives it another limit")
}

fn volume_failed(error: IoError) -> BackendError {
    BackendError::new(kind_of(&error), "cannot open the machine's disk").because(error)
}

/// Runs blocking work on a thread of its own.
pub async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, BackendError> + Send + 'static,
) -> Result<T, BackendError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(e) => Err(BackendError::new(ProblemKind::Failed, format!("cannot {what}")).because(e)),
    }
}

/// The mode of the API as the mode of the data path.
pub fn volume_mode(mode: CacheMode) -> headwater_volume::CacheMode {
    match mode {
        CacheMode::Ram => headwater_volume::CacheMode::Ram,
        CacheMode::RamDisk => headwater_volume::CacheMode::RamDisk,
        CacheMode::Disk => headwater_volume::CacheMode::Disk,
    }
}

/// The memory that this process can use at most: that of the host, or the limit of its container or unit. Without a
/// limit if it cannot be determined.
pub fn host_memory_bytes() -> u64 {
    SystemPressure::new().memory_bytes().unwrap_or(u64::MAX)
}

mod in_keeper;
mod recordings;
pub mod scratch;
mod served;
mod shortage;
#[cfg(test)]
mod tests;
