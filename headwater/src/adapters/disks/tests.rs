//! Disks that are opened at the wrong moment or in the wrong place, and frozen without a store.

use std::sync::atomic::{AtomicBool, Ordering};

use headwater_api::DiskTransport;
use headwater_api::platform::Firmware;
use headwater_block::blocking;
use headwater_image::{ImportOptions, null_device};
use headwater_service::backend::{PersistentDiskRef, SealOrder};
use headwater_store::{Access, LocalDir};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, wait_until};
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};

use super::*;
use crate::adapters::images::tests::Unlisted;
use crate::adapters::images::version_of;
use crate::caches::WritingArgs;

mod scans;

/// Less room than the usual write cache asks for, which not every host has.
fn small() -> CacheSettings {
    CacheSettings { disk_bytes: 1 << 30, ..CacheSettings::default() }
}

/// A store with one image, and what disks over it need.
struct Fixture {
    dir: tempfile::TempDir,
    volumes: Volumes,
    request: PersistentDiskRequest,
}

impl Fixture {
    fn new() -> Self {
        let writing =
            WritingArgs { buffering: headwater_volume::Buffering::Buffered, ..WritingArgs::default() };
        let caches = CacheArgs { writing, ..CacheArgs::default() };
        Self::with(1 << 20, caches)
    }

    fn with(image_bytes: u64, caches: CacheArgs) -> Self {
        Self::over(null_device(image_bytes).unwrap(), caches)
    }

    fn over(image: Arc<dyn Device>, caches: CacheArgs) -> Self {
        Self::of(image, caches, |store| Arc::new(store))
    }

    fn of(image: Arc<dyn Device>, caches: CacheArgs, offer: fn(LocalDir) -> Arc<dyn Store>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
        let name: headwater_store::ImageName = "disk".parse().unwrap();
        let options = ImportOptions::new(name.clone(), 500);
        headwater_image::import(image, &store, &options, &mut |_| {}).unwrap();
        let image = store.image(&name).unwrap().unwrap();
        let version = version_of(&image, image.newest().unwrap());
        let [cache, keys, recordings] = ["cache", "keys", "recordings"].map(|name| dir.path().join(name));
        std::fs::create_dir(&cache).unwrap();
        let volumes = Volumes::new(
            offer(store),
            Directories { overflow: cache, keys, recordings },
            caches,
            &StreamArgs::default(),
            None,
            None,
        )
        .unwrap();
        let cache = CacheSettings { persistent: true, ..small() };
        let kept = PersistentDiskRef { id: Uuid::from_u128(7), is_begun: false };
        let request = PersistentDiskRequest { kept, version, cache, is_edit: false };
        Self { dir, volumes, request }
    }

    /// Opens the disk as a machine's start does, and closes it.
    fn begin(&self) -> Result<(), BackendError> {
        let PersistentDiskRequest { kept, version, cache, .. } = &self.request;
        let firmware = Some(headwater_api::platform::Firmware::Bios);
        let little_space = LittleSpace::Refused;
        let open = Opening { kept: Some(*kept), little_space, firmware, secure_boot: false, left: None };
        let opened = self.volumes.opener().volume("vm1", version, cache, open)?;
        opened.volume.close();
        Ok(())
    }

    /// Of the machine `lab`, which is on.
    fn disk(&self, cache: CacheSettings) -> DiskRequest {
        DiskRequest {
            machine: "lab".to_owned(),
            uuid: Uuid::from_u128(9),
            run_dir: self.dir.path().to_owned(),
            version: self.request.version.clone(),
            cache,
            kept: None,
            goes_on: false,
            is_recorded: false,
            transport: DiskTransport::Nbd,
            firmware: Firmware::default(),
            secure_boot: false,
            scratch_bytes: 0,
        }
    }

    /// Switches by which its disk's syncs and writes fail.
    fn fails_on_demand(&mut self) -> (Arc<AtomicBool>, Arc<AtomicBool>) {
        let (fails, is_full) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let real = open_engine().unwrap();
        let engine = Unsynced { real, fails: Arc::clone(&fails), is_full: Arc::clone(&is_full) };
        self.volumes.host = Arc::new(Host::with_engine(u64::MAX, Arc::new(engine)).unwrap());
        (fails, is_full)
    }

    fn discard(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.volumes.discard(self.request.kept.id)).unwrap();
    }

    fn key_exists(&self) -> bool {
        self.dir.path().join(format!("keys/disk-{}", self.request.kept.id)).exists()
    }

    fn open_reader(&self) -> Result<(), BackendError> {
        self.volumes.read_persistent(&self.request).map(drop)
    }
}

#[test]
fn a_disk_of_a_machine_that_is_off_has_the_sectors_of_its_version() {
    let of = |logical_block_bytes| {
        let options = ReferenceOptions { logical_block_bytes, ..ReferenceOptions::default() };
        let image = ReferenceDisk::with_contents(vec![0; 1 << 20], options);
        let fixture = Fixture::over(Arc::new(image), CacheArgs::default());
        let geometry = fixture.volumes.geometry_over(&fixture.request.version).unwrap();
        assert!(geometry.read_only && geometry.size_bytes == 1 << 20);
        geometry.logical_block_bytes
    };
    assert_eq!((of(512), of(4096)), (512, 4096));
}

#[test]
fn a_disk_that_was_discarded_does_not_come_back_empty_to_a_reader() {
    let fixture = Fixture::new();
    assert_eq!(fixture.open_reader().unwrap_err().kind(), ProblemKind::Conflict);
    fixture.begin().unwrap();
    fixture.open_reader().unwrap();
    // The reader looked it up before that.
    fixture.discard();
    assert_eq!(fixture.open_reader().unwrap_err().kind(), ProblemKind::Conflict);
    assert!(!fixture.key_exists());
}

#[test]
fn a_disk_that_could_not_be_begun_can_be_once_its_directory_is_right() {
    let fixture = Fixture::new();
    let (cache, aside) = (fixture.dir.path().join("cache"), fixture.dir.path().join("aside"));
    std::fs::rename(&cache, &aside).unwrap();
    std::fs::write(&cache, "no directory").unwrap();
    for _ in 0..2 {
        let error = fixture.begin().unwrap_err();
        assert!(error.kind() != ProblemKind::Damaged && !fixture.key_exists(), "{error}");
    }
    std::fs::remove_file(&cache).unwrap();
    std::fs::rename(&aside, &cache).unwrap();
    fixture.begin().unwrap();
    // From now on there is something to lose.
    std::fs::remove_dir_all(cache.join(format!("disk-{}", fixture.request.kept.id))).unwrap();
    for _ in 0..2 {
        assert_eq!(fixture.begin().unwrap_err().kind(), ProblemKind::Damaged);
    }
    assert!(fixture.key_exists());
}

#[test]
fn a_disk_whose_daemon_was_killed_while_it_began_is_begun_again() {
    let fixture = Fixture::new();
    let name = format!("disk-{}", fixture.request.kept.id);
    let keys = fixture.dir.path().join("keys");
    let map = fixture.dir.path().join("cache").join(&name).join("map");
    let unfinished = || {
        fixture.begin().unwrap();
        std::fs::rename(keys.join(&name), keys.join(format!("{name}.new"))).unwrap();
    };
    // It died after the map was there, and before.
    unfinished();
    unfinished();
    std::fs::remove_file(&map).unwrap();
    assert_eq!(fixture.open_reader().unwrap_err().kind(), ProblemKind::Conflict);
    fixture.begin().unwrap();
    assert!(fixture.key_exists() && map.exists());
    assert_eq!(std::fs::read_dir(&keys).unwrap().count(), 1);
}

#[test]
fn a_machines_disk_is_frozen_without_asking_the_store() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    // The guest's file systems stand still meanwhile. A store that is away keeps one waiting; one that is gone refuses.
    let (store, aside) = (fixture.dir.path().join("store"), fixture.dir.path().join("aside"));
    std::fs::rename(&store, &aside).unwrap();
    let frozen = disk.freeze();
    std::fs::rename(&aside, &store).unwrap();
    drop(frozen.unwrap());
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn that_a_disk_is_being_read_is_known_before_it_is_to_be_frozen() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    disk.can_freeze().unwrap();
    let reader = fixture.volumes.open_reader("lab").unwrap().unwrap();
    for refused in [disk.can_freeze().unwrap_err(), disk.freeze().err().unwrap()] {
        assert_eq!(refused.kind(), ProblemKind::Conflict);
        assert!(
            refused.to_string().contains("by 1 connection(s)") && refused.advice().is_some(),
            "{refused}"
        );
    }
    drop(reader);
    disk.can_freeze().unwrap();
    drop(disk.freeze().unwrap());
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn a_seal_takes_a_kept_disk_from_nobody_who_reads_it() {
    let fixture = Fixture::new();
    fixture.begin().unwrap();
    let reader = fixture.volumes.read_persistent(&fixture.request).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let open = || runtime.block_on(fixture.volumes.open_persistent(fixture.request.clone()));
    let refused = open().err().unwrap();
    assert_eq!(refused.kind(), ProblemKind::Conflict);
    assert!(refused.to_string().contains("by 1 connection(s)"), "{refused}");
    blocking::read(&reader, 0, &mut [0; 4096]).unwrap();
    drop(reader);
    // Nor can anybody read it while it is sealed.
    let frozen = open().unwrap();
    fixture.open_reader().unwrap_err();
    drop(frozen);
    fixture.open_reader().unwrap();
}

#[test]
fn a_seal_begins_no_disk_that_its_machine_did_not_begin() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    // The image's edit, if it has one, is another machine's: only who is asked for an edit says how to give it up.
    for is_edit in [false, true] {
        let request = PersistentDiskRequest { is_edit, ..fixture.request.clone() };
        let refused = runtime.block_on(fixture.volumes.open_persistent(request)).err().unwrap();
        assert_eq!(refused.kind(), ProblemKind::Conflict);
        assert!(refused.to_string().contains("has not created its persistent disk yet"), "{refused}");
        let advice = refused.advice().unwrap();
        assert!(advice.starts_with("start the machine first"), "{advice}");
        assert_eq!(advice.contains("'headwater image discard disk'"), is_edit, "{advice}");
    }
    // Nothing is there of it: a start boots what its image means by then.
    let left = |dir| std::fs::read_dir(fixture.dir.path().join(dir)).map_or(0, Iterator::count);
    assert_eq!((left("cache"), left("keys")), (0, 0));
}

#[test]
fn a_seal_is_no_failure_where_its_version_cannot_be_looked_up() {
    let image = null_device(1 << 20).unwrap();
    let fixture = Fixture::of(image, CacheArgs::default(), |store| Arc::new(Unlisted(store)));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    blocking::write(&*served.volume, 0, &[7; 4096]).unwrap();
    drop(served);
    let order = SealOrder {
        source: "lab".to_owned(),
        note: String::new(),
        author: String::new(),
        newest_at_most: None,
        is_edit: false,
        keeps_identity: false,
    };
    let sealed = runtime.block_on(disk.freeze().unwrap().seal(order, Arc::default())).unwrap();
    assert_eq!((sealed.version.number, sealed.version.channels), (2, Vec::new()));
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn only_where_nothing_was_edited_is_it_said_how_to_give_an_edit_up() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    for is_edit in [false, true] {
        let order = SealOrder {
            source: "lab".to_owned(),
            note: String::new(),
            author: String::new(),
            newest_at_most: None,
            is_edit,
            keeps_identity: false,
        };
        let refused = runtime.block_on(disk.freeze().unwrap().seal(order, Arc::default())).unwrap_err();
        let advice = refused.advice().unwrap();
        assert!(advice.starts_with("change something on the machine first"), "{advice}");
        assert_eq!(advice.contains("'headwater image discard disk'"), is_edit, "{advice}");
    }
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn what_a_kept_disk_answered_before_it_was_closed_is_there_at_the_next_start() {
    const BLOCKS: u64 = 256;
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let PersistentDiskRequest { kept, cache, .. } = fixture.request;
    let open = || {
        let request = DiskRequest { kept: Some(kept), ..fixture.disk(cache) };
        runtime.block_on(fixture.volumes.open(request)).unwrap()
    };
    let connect = || {
        let socket = fixture.dir.path().join("disk.sock");
        headwater_nbd::client::Client::open(&format!("nbd+unix:///?socket={}", socket.display())).unwrap()
    };
    let disk = open();
    let client = connect();
    let (tell, told) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        let mut held = vec![0; BLOCKS as usize];
        for number in 0.. {
            let value = (number / BLOCKS % 251) as u8 + 1;
            if let Err(error) = blocking::write(&*client, number % BLOCKS * 4096, &[value; 4096]) {
                return (held, (number % BLOCKS) as usize, error);
            }
            held[(number % BLOCKS) as usize] = value;
            if number == 4 * BLOCKS {
                tell.send(()).unwrap();
            }
        }
        unreachable!("it writes until it is refused")
    });
    told.recv().unwrap();
    runtime.block_on(disk.close()).unwrap();
    drop(disk);
    let (held, refused, error) = writer.join().unwrap();
    let disk = open();
    let mut read = vec![0; (BLOCKS * 4096) as usize];
    blocking::read(&*connect(), 0, &mut read).unwrap();
    runtime.block_on(disk.close()).unwrap();
    let blocks = read.chunks(4096).zip(&held).enumerate();
    let lost = blocks.filter(|(block, (read, held))| *block != refused && read.iter().any(|b| b != *held));
    assert_eq!(lost.count(), 0, "answered before {error}");
}

#[test]
fn to_ask_whether_a_disk_is_full_disconnects_nobody_and_to_relieve_it_does() {
    use headwater_block::blocking;

    const MIB: usize = 1 << 20;
    let writing = WritingArgs { pause: 0, ..WritingArgs::default() };
    let fixture = Fixture::with(64 << 20, CacheArgs { writing, ..CacheArgs::default() });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let cache = CacheSettings { mode: CacheMode::Ram, ram_bytes: MIN_RAM_BYTES, ..small() };
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(cache))).unwrap();
    let reader = fixture.volumes.open_reader("lab").unwrap().unwrap();
    disk.relieve();
    assert_eq!(disk.shortage(), None);
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    // Packing gains nothing on it.
    let mut state = 1_u64;
    let noise: Vec<u8> = (0..MIB)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    let refused = (0..64).find_map(|at| blocking::write(&*served.volume, at << 20, &noise).err());
    assert_eq!(refused.unwrap().kind(), IoErrorKind::NoSpace);
    let mut block = [0; 4096];
    for _ in 0..2 {
        assert!(disk.shortage().unwrap().message.contains("is full"));
        blocking::read(&reader, 0, &mut block).unwrap();
    }
    disk.relieve();
    blocking::read(&reader, 0, &mut block).unwrap_err();
    drop(served);
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn what_a_backup_reads_is_no_part_of_a_boot() {
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};

    let image = Rng::new(3).bytes(1 << 20);
    let options = ReferenceOptions { read_only: true, ..ReferenceOptions::default() };
    let source = Arc::new(ReferenceDisk::with_contents(image.clone(), options));
    let writing = WritingArgs { buffering: headwater_volume::Buffering::Buffered, ..WritingArgs::default() };
    let fixture = Fixture::over(source, CacheArgs { writing, ..CacheArgs::default() });
    let manifest = hash_of(&fixture.request.version).unwrap();
    let recorded = || fixture.volumes.traces().find(manifest).map(|(trace, _)| trace);
    let mut bytes = vec![0; image.len()];

    // Of a machine that is off.
    fixture.begin().unwrap();
    let reader = fixture.volumes.read_persistent(&fixture.request).unwrap();
    blocking::read(&reader, 0, &mut bytes).unwrap();
    assert!(bytes == image);
    drop(reader);
    assert_eq!(recorded(), None);

    // Of one that boots meanwhile.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let reader = fixture.volumes.open_reader("lab").unwrap().unwrap();
    blocking::read(&reader, 0, &mut bytes).unwrap();
    // What is in memory by now is read without a thread.
    blocking::read(&reader, 0, &mut bytes).unwrap();
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    blocking::read(&*served.volume, 256 << 10, &mut [0; 4096]).unwrap();
    drop((reader, served));
    runtime.block_on(disk.close()).unwrap();
    let chunks = || recorded().unwrap().chunks.iter().map(|touched| touched.chunk).collect::<Vec<_>>();
    assert_eq!(chunks(), [4]);

    // Nor is what is read below a disk that was in use, also where that could not be noted.
    let request = DiskRequest { kept: Some(fixture.request.kept), ..fixture.disk(fixture.request.cache) };
    let disk = runtime.block_on(fixture.volumes.open(request)).unwrap();
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    blocking::read(&*served.volume, 512 << 10, &mut [0; 4096]).unwrap();
    drop(served);
    runtime.block_on(disk.close()).unwrap();
    assert_eq!(chunks(), [4]);
}

/// The real engine; its syncs, or its writes, fail on demand.
struct Unsynced {
    real: Arc<dyn IoEngine>,
    fails: Arc<AtomicBool>,
    is_full: Arc<AtomicBool>,
}

impl IoEngine for Unsynced {
    fn submit(&self, op: IoOp) {
        if op.direction == Direction::Write && self.is_full.load(Ordering::Relaxed) {
            return (op.done)(Err(std::io::ErrorKind::StorageFull.into()), op.buffer);
        }
        self.real.submit(op);
    }

    fn write_at(&self, file: &std::fs::File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.real.write_at(file, bytes, offset)
    }

    fn sync(&self, file: &std::fs::File) -> std::io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(std::io::Error::from_raw_os_error(5));
        }
        self.real.sync(file)
    }
}

/// The real engine; a sync begins only once the receiver has got something, if there is one.
struct HeldUp {
    real: Arc<dyn IoEngine>,
    until: Arc<Mutex<Option<std::sync::mpsc::Receiver<()>>>>,
    steps: Arc<Mutex<Vec<&'static str>>>,
}

impl IoEngine for HeldUp {
    fn submit(&self, op: IoOp) {
        self.real.submit(op);
    }

    fn write_at(&self, file: &std::fs::File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.real.write_at(file, bytes, offset)
    }

    fn sync(&self, file: &std::fs::File) -> std::io::Result<()> {
        let until = self.until.lock().take();
        if let Some(until) = until {
            until.recv().unwrap();
            // A second closing that does not wait for this one has ended by then.
            std::thread::sleep(std::time::Duration::from_millis(200));
            self.steps.lock().push("saved");
        }
        self.real.sync(file)
    }
}

#[test]
fn who_closes_a_disk_again_waits_until_it_is_saved() {
    let mut fixture = Fixture::new();
    let (until, steps) = <(Arc<Mutex<_>>, Arc<Mutex<Vec<_>>>)>::default();
    let engine =
        HeldUp { real: open_engine().unwrap(), until: Arc::clone(&until), steps: Arc::clone(&steps) };
    fixture.volumes.host = Arc::new(Host::with_engine(u64::MAX, Arc::new(engine)).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let request = DiskRequest { kept: Some(fixture.request.kept), ..fixture.disk(fixture.request.cache) };
    let disk = runtime.block_on(fixture.volumes.open(request)).unwrap();
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    blocking::write(&*served.volume, 0, &[1; 4096]).unwrap();
    drop(served);
    let (go_on, hold_up) = std::sync::mpsc::channel();
    *until.lock() = Some(hold_up);
    let close = |name| {
        let (disk, steps) = (Arc::clone(&disk), Arc::clone(&steps));
        runtime.spawn(async move {
            disk.close().await.unwrap();
            steps.lock().push(name);
        })
    };
    let first = close("closed");
    wait_until("the closing saves the disk", || until.lock().is_none());
    let second = close("closed");
    go_on.send(()).unwrap();
    runtime.block_on(first).unwrap();
    runtime.block_on(second).unwrap();
    assert_eq!(*steps.lock(), ["saved", "closed", "closed"]);
}

#[test]
fn a_kept_disk_that_is_not_made_durable_is_an_alarm_until_it_is_opened_again() {
    let mut fixture = Fixture::new();
    let (fails, _) = fixture.fails_on_demand();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let open = |is_begun| {
        let kept = Some(PersistentDiskRef { is_begun, ..fixture.request.kept });
        let request = DiskRequest { kept, ..fixture.disk(fixture.request.cache) };
        let disk = runtime.block_on(fixture.volumes.open(request)).unwrap();
        (disk, fixture.volumes.readable.of_machine("lab").unwrap())
    };
    let (disk, served) = open(false);
    blocking::write(&*served.volume, 0, &[1; 4096]).unwrap();
    blocking::flush(&*served.volume).unwrap();
    assert_eq!(disk.shortage(), None);
    blocking::write(&*served.volume, 0, &[2; 4096]).unwrap();
    fails.store(true, Ordering::Relaxed);
    blocking::flush(&*served.volume).unwrap_err();
    fails.store(false, Ordering::Relaxed);
    let alarm = disk.shortage().expect("an alarm");
    assert!(alarm.message.contains("cannot be made durable"), "{alarm:?}");
    assert!(alarm.advice.contains("stop the machine and start it again"), "{alarm:?}");
    runtime.block_on(disk.close()).unwrap_err();
    drop((disk, served));
    let (disk, served) = open(true);
    blocking::flush(&*served.volume).unwrap();
    assert_eq!(disk.shortage(), None);
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn a_kept_disk_without_its_last_writes_is_an_alarm_and_an_error_and_no_version() {
    let mut fixture = Fixture::new();
    let (_, is_full) = fixture.fails_on_demand();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let PersistentDiskRequest { kept, cache, .. } = fixture.request;
    let open = || {
        let request = DiskRequest { kept: Some(kept), ..fixture.disk(cache) };
        let disk = runtime.block_on(fixture.volumes.open(request)).unwrap();
        (disk, fixture.volumes.readable.of_machine("lab").unwrap())
    };
    let seals = || runtime.block_on(fixture.volumes.open_persistent(fixture.request.clone())).map(drop);
    let (disk, served) = open();
    blocking::write(&*served.volume, 0, &[1; 4096]).unwrap();
    blocking::flush(&*served.volume).unwrap();
    blocking::write(&*served.volume, 0, &[2; 4096]).unwrap();
    is_full.store(true, Ordering::Relaxed);
    assert_eq!(blocking::flush(&*served.volume).unwrap_err().kind(), IoErrorKind::NoSpace);
    // Nor is it handed over to another process, which would not have the last writes.
    let refused = fixture.volumes.can_hand_over().unwrap_err();
    assert!(refused.to_string().contains("machine 'lab' cannot be saved"), "{refused}");
    // It may have room again in a moment.
    assert_eq!(disk.shortage(), None);
    wait_until("there is an alarm", || disk.shortage().is_some());
    assert!(disk.shortage().unwrap().message.contains("cannot be written"));
    assert_eq!(runtime.block_on(disk.close()).unwrap_err().kind(), ProblemKind::NoSpace);
    runtime.block_on(disk.close()).unwrap();
    drop((disk, served));
    is_full.store(false, Ordering::Relaxed);
    let refused = seals().unwrap_err();
    let says = (refused.kind(), refused.to_string().contains("last writes may be missing"));
    assert_eq!(says, (ProblemKind::Conflict, true), "{refused}");
    // A start that fails changes nothing of that.
    let (disk, served) = open();
    runtime.block_on(disk.close()).unwrap();
    drop((disk, served));
    assert_eq!(seals().unwrap_err().kind(), ProblemKind::Conflict);
    // Its machine goes on with what was saved, and once it is stopped in order there is nothing to miss.
    let (disk, served) = open();
    let mut read = [0; 4096];
    blocking::read(&*served.volume, 0, &mut read).unwrap();
    assert_eq!(read, [1; 4096]);
    runtime.block_on(disk.close()).unwrap();
    drop((disk, served));
    seals().unwrap();
}

#[test]
fn a_disk_whose_use_cannot_be_recorded_is_not_served() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let PersistentDiskRequest { kept, cache, .. } = fixture.request;
    let open = || {
        let request = DiskRequest { kept: Some(kept), ..fixture.disk(cache) };
        runtime.block_on(fixture.volumes.open(request))
    };
    let seals = || runtime.block_on(fixture.volumes.open_persistent(fixture.request.clone())).map(drop);
    runtime.block_on(open().unwrap().close()).unwrap();
    seals().unwrap();
    // The mark cannot be created, as in a directory without space.
    let mark = fixture.dir.path().join(format!("keys/disk-{}.incomplete", kept.id));
    std::os::unix::fs::symlink("nowhere/at/all", &mark).unwrap();
    let refused = open().err().expect("it cannot be recorded");
    assert!(refused.to_string().contains("cannot record that the machine uses"), "{refused}");
    std::fs::remove_file(&mark).unwrap();
    seals().unwrap();
    let disk = open().unwrap();
    assert!(mark.exists());
    runtime.block_on(disk.close()).unwrap();
    assert!(!mark.exists());
}

#[test]
fn what_died_in_the_directory_of_overflow_files_goes_and_what_is_somebodys_stays() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let sweep = || runtime.block_on(fixture.volumes.sweep(&[])).unwrap();
    let cache = fixture.dir.path().join("cache");
    let (mine, left) = (cache.join("mine"), cache.join(".headwater-overflow-7-0"));
    std::fs::write(&mine, "x").unwrap();
    std::fs::write(&left, "x").unwrap();
    let removed = sweep();
    assert!(removed.len() == 1 && removed[0].contains(&left.display().to_string()), "{removed:?}");
    assert!(mine.exists() && !left.exists());
    // Others may have theirs where a link leads.
    std::fs::write(&left, "x").unwrap();
    let elsewhere = fixture.dir.path().join("elsewhere");
    std::fs::rename(&cache, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &cache).unwrap();
    assert_eq!(sweep(), [""; 0]);
    assert!(left.exists());
}

#[test]
fn a_limit_of_an_earlier_release_that_stays_is_not_refused_with_another_one() {
    let fixture = Fixture::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let before = CacheSettings { disk_bytes: MIN_DISK_BYTES / 2, ..small() };
    let after = CacheSettings { ram_bytes: 2 * MIN_RAM_BYTES, ..before };
    runtime.block_on(fixture.volumes.check(&after)).unwrap_err();
    runtime.block_on(fixture.volumes.check_change(&before, &after)).unwrap();
    let asked = CacheSettings { disk_bytes: before.disk_bytes + 1, ..after };
    runtime.block_on(fixture.volumes.check_change(&before, &asked)).unwrap_err();
    // One that was restarted is on with the least that there is now, and stays so.
    let request = DiskRequest { goes_on: true, ..fixture.disk(before) };
    let disk = runtime.block_on(fixture.volumes.open(request)).unwrap();
    disk.check_limits(&after).unwrap();
    disk.set_limits(&after);
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    let limits = served.volume.counters().cache;
    assert_eq!((limits.disk_limit_bytes, limits.ram_target_bytes), (MIN_DISK_BYTES, 2 * MIN_RAM_BYTES));
    drop(served);
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn only_a_start_that_somebody_asks_for_needs_room_for_the_whole_limit() {
    let mut fixture = Fixture::new();
    fixture.begin().unwrap();
    // More than any disk has.
    let large = CacheSettings { disk_bytes: 1 << 60, ..small() };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let open =
        |goes_on| runtime.block_on(fixture.volumes.open(DiskRequest { goes_on, ..fixture.disk(large) }));
    let refused = open(false).err().expect("there is no room");
    assert_eq!(refused.kind(), ProblemKind::Invalid);
    assert!(refused.advice().is_some_and(|advice| advice.contains("machine set lab --disk SIZE")));
    let disk = open(true).unwrap();
    disk.check_limits(&small()).unwrap();
    let larger = CacheSettings { disk_bytes: 1 << 61, ..large };
    let refused = disk.check_limits(&larger).unwrap_err();
    let why = format!("{:#}", anyhow::Error::new(refused));
    assert!(why.contains("cannot have that limit") && why.contains("has only"), "{why}");
    runtime.block_on(disk.close()).unwrap();

    // What is only read needs no room at all.
    fixture.request.cache.disk_bytes = 1 << 60;
    assert_eq!(fixture.begin().unwrap_err().kind(), ProblemKind::Invalid);
    fixture.open_reader().unwrap();
    runtime.block_on(fixture.volumes.open_persistent(fixture.request.clone())).map(drop).unwrap();
}

/// Ends writers also where the test panics.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn machines_share_the_memory_of_the_host_by_their_weights_also_by_new_ones() {
    const MIB: usize = 1 << 20;
    let writing = WritingArgs { buffering: headwater_volume::Buffering::Buffered, ..WritingArgs::default() };
    let fixture = Fixture::with(128 << 20, CacheArgs { writing, cache_ram: Some(64 << 20) });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let weighing = |weight| CacheSettings { weight, ram_bytes: 64 << 20, ..small() };
    let machines = [("light", 100), ("heavy", 300)];
    let disks = machines.map(|(machine, weight)| {
        let run_dir = fixture.dir.path().join(machine);
        std::fs::create_dir(&run_dir).unwrap();
        let request = DiskRequest { machine: machine.to_owned(), run_dir, ..fixture.disk(weighing(weight)) };
        runtime.block_on(fixture.volumes.open(request)).unwrap()
    });
    let volumes =
        machines.map(|(machine, _)| fixture.volumes.readable.of_machine(machine).unwrap().volume.clone());
    let [light, heavy] = [0, 1].map(|at: usize| {
        let volume = volumes[at].clone();
        move || volume.counters().cache.ram_share_bytes as f64
    });
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _guard = StopOnDrop(&stop);
        // Who does not ask for memory lends it.
        for (seed, volume) in (1..).zip(&volumes) {
            let (stop, data) = (&stop, headwater_testkit::Rng::new(seed).bytes(MIB));
            scope.spawn(move || {
                for at in (0..128).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                    blocking::write(&**volume, at << 20, &data).unwrap();
                }
            });
        }
        wait_until("three times as much is the heavy one's", || (2.5..=3.7).contains(&(heavy() / light())));
        disks[0].set_limits(&weighing(300));
        disks[1].set_limits(&weighing(100));
        wait_until("it is the other way round", || (2.5..=3.7).contains(&(light() / heavy())));
    });
    for disk in &disks {
        runtime.block_on(disk.close()).unwrap();
    }
}
