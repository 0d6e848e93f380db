//! The scan: one pass over the metadata of each file system on a disk.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_filesystems::{
    Bytes, Fault, Kind, Names, Owner, Partition, Placed, Placement, ReadAt, Scanned, Visits, fault, identify,
    logical_volumes, open_for_scan, partitions,
};

use crate::changed::{Changed, Held};
use crate::claims::Claims;
use crate::contents::{Class, Contents, Item, PartitionContents};

/// The most owners of a file system that have a sum of their own: about 50 MiB.
pub const OWNERS_MAX: usize = 1 << 20;
/// The most memory for the names of a file system: about two million files.
pub const NAMES_BYTES_MAX: usize = 128 << 20;
/// The most files and the most directories in the result.
pub const ITEMS_MAX: usize = 1000;
/// The most bytes of paths in the result, for files and for directories each.
pub const PATHS_BYTES_MAX: usize = 1 << 20;

/// The number of the first logical volume: no disk has so many partitions.
pub const FIRST_VOLUME: u32 = 1001;

/// After how many runs and names of a file system it is asked whether anybody still wants the result.
const LOOK_SCANNED: u64 = 4096;
/// After how many files with changes.
const LOOK_OWNERS: usize = 1024;

/// Names of files that are swap space, in the root directory of Linux and of Windows.
const SWAP_FILES: [&str; 7] = [
    "/swapfile",
    "/swap.img",
    "/swap/swapfile",
    "/var/swap",
    "/pagefile.sys",
    "/swapfile.sys",
    "/hiberfil.sys",
];

/// What tells that nobody wants the result any more.
pub type IsCancelled = Arc<dyn Fn() -> bool + Send + Sync>;

/// Finds the owner of each changed block of a disk with sectors of so many bytes.
pub fn scan(
    disk: &Arc<dyn ReadAt>,
    sector_bytes: u64,
    changed: &Changed,
    is_cancelled: &IsCancelled,
) -> Result<Contents, Fault> {
    let mut claims = Claims::new(changed);
    let mut contents = Contents::default();
    let mut found = Vec::new();
    match partitions(&**disk, sector_bytes) {
        Ok(read) => {
            if let Some(unread) = read.unread {
                contents.partitions.push(remark_of_disk(unread.to_string()));
            }
            found = read.partitions;
        }
        Err(why) => contents.partitions.push(remark_of_disk(why.to_string())),
    }
    let physical: Vec<Partition> =
        found.iter().filter(|partition| is_of_lvm(disk, partition)).map(|it| fitted(disk, it)).collect();
    // Blocks that no volume claims belong to the physical volume.
    let mut scanning = Scanning { disk, claims: &mut claims, contents: &mut contents, is_cancelled };
    of_volumes(&physical, &mut scanning);
    for partition in &found {
        if is_cancelled() {
            return Err(fault("the scan was cancelled"));
        }
        let fits = fitted(disk, partition);
        let place = Place { number: partition.number, name: None, placement: Placement::of(&fits) };
        of_place(&place, &mut scanning);
    }
    if is_cancelled() {
        return Err(fault("the scan was cancelled"));
    }
    // Without partitions that can be read, nobody knows what lies where.
    let class = if found.is_empty() { Class::Unknown } else { Class::Outside };
    contents.count(class, claims.claim(0..u64::MAX));
    contents.files.sort_by_key(|item| (std::cmp::Reverse(item.held.total_bytes()), item.id));
    contents.files = Largest::of(contents.files);
    contents.directories.sort_by_key(|item| (std::cmp::Reverse(item.held.total_bytes()), item.path.clone()));
    contents.directories = Largest::of(contents.directories);
    for held in contents.classes.values() {
        contents.held.plus(*held);
    }
    Ok(contents)
}

fn remark_of_disk(remark: String) -> PartitionContents {
    let kind = "a partition table that cannot be read".to_owned();
    PartitionContents { number: 0, kind, held: Held::default(), remarks: vec![remark] }
}

/// A partition as far as it is on the disk.
fn fitted(disk: &Arc<dyn ReadAt>, partition: &Partition) -> Partition {
    let end = partition.offset_bytes.saturating_add(partition.len_bytes).min(disk.len_bytes());
    let offset_bytes = partition.offset_bytes.min(end);
    Partition { offset_bytes, len_bytes: end - offset_bytes, ..*partition }
}

fn is_of_lvm(disk: &Arc<dyn ReadAt>, partition: &Partition) -> bool {
    let kind = identify(&mut Bytes::new(Arc::clone(disk), &fitted(disk, partition)));
    kind.is_ok_and(|kind| kind.is_some_and(|found| found.kind == Kind::Lvm))
}

/// A partition or a logical volume.
struct Place {
    number: u32,
    /// Of a logical volume.
    name: Option<String>,
    placement: Placement,
}

/// What a scan of a disk works on.
struct Scanning<'a, 'b> {
    disk: &'a Arc<dyn ReadAt>,
    claims: &'a mut Claims<'b>,
    contents: &'a mut Contents,
    is_cancelled: &'a IsCancelled,
}

/// Claims what belongs to the logical volumes of a disk.
fn of_volumes(physical: &[Partition], scanning: &mut Scanning<'_, '_>) {
    for (number, volume) in (FIRST_VOLUME..).zip(logical_volumes(scanning.disk, physical)) {
        if (scanning.is_cancelled)() {
            return;
        }
        match volume.placement {
            Ok(placement) => {
                let place = Place { number, name: Some(volume.name), placement };
                of_place(&place, scanning);
            }
            Err(why) => scanning.contents.partitions.push(PartitionContents {
                number,
                kind: format!("{}: a volume that is not read", volume.name),
                held: Held::default(),
                remarks: vec![why.to_string()],
            }),
        }
    }
}

/// Claims what belongs to a partition or a volume.
fn of_place(place: &Place, scanning: &mut Scanning<'_, '_>) {
    let Scanning { disk, claims, contents, is_cancelled } = scanning;
    let (disk, is_cancelled) = (*disk, *is_cancelled);
    let len_bytes = place.placement.len_bytes();
    let own: Arc<dyn ReadAt> = Arc::new(Placed::new(Arc::clone(disk), place.placement.clone()));
    let whole = Partition { number: place.number, offset_bytes: 0, len_bytes };
    let kind = identify(&mut Bytes::new(Arc::clone(&own), &whole));
    let shown = match &kind {
        Ok(Some(found)) => found.to_string(),
        Ok(None) => "no known file system".to_owned(),
        Err(_) => "not readable".to_owned(),
    };
    let mut described = PartitionContents {
        number: place.number,
        kind: place.name.as_ref().map_or(shown.clone(), |name| format!("{name}: {shown}")),
        held: Held::default(),
        remarks: kind.as_ref().err().map(ToString::to_string).into_iter().collect(),
    };
    let found = kind.ok().flatten().map(|found| found.kind);
    let mut rest = if found == Some(Kind::Swap) { Class::Swap } else { Class::Unknown };
    if found.is_some_and(Kind::is_scanned) {
        let mut pass = Pass::new(&place.placement, claims, is_cancelled);
        // A reader that panics is a fault of ours, and must not end the disks of all machines.
        let read = catch_unwind(AssertUnwindSafe(|| pass.run(&own, &whole)));
        let read = read.unwrap_or_else(|_| Err(fault("its reader broke off")));
        described.held.plus(pass.take_into(place.number, contents, &mut described.remarks));
        match read {
            Ok(true) => rest = Class::Free,
            Ok(false) => {}
            Err(why) => described.remarks.push(format!("it was not read to its end: {why}")),
        }
    }
    let left = claim(claims, &place.placement, 0..len_bytes);
    contents.count(rest, left);
    if rest == Class::Free && left != Held::default() {
        contents.free.insert(place.number, left);
    }
    described.held.plus(left);
    if described.held != Held::default() || !described.remarks.is_empty() {
        contents.partitions.push(described);
    }
}

/// Claims bytes of a file system.
fn claim(claims: &mut Claims<'_>, placement: &Placement, bytes: Range<u64>) -> Held {
    let mut held = Held::default();
    for place in placement.on_disk(bytes) {
        held.plus(claims.claim(place));
    }
    held
}

/// A pass over one file system.
struct Pass<'a, 'b> {
    placement: &'a Placement,
    claims: &'a mut Claims<'b>,
    is_cancelled: &'a IsCancelled,
    /// How many runs and names there were.
    scanned: u64,
    names: Names,
    /// Whether there were more names than fit in memory.
    has_more_names: bool,
    /// The directories, ascending once the pass is over.
    parents: Vec<u64>,
    root: u64,
    owners: HashMap<u64, Held>,
    /// Of files beyond [`OWNERS_MAX`].
    others: Held,
    journal: Held,
    metadata: Held,
    unreadable: u64,
    first_unreadable: Option<String>,
    remark: Option<String>,
}

impl<'a, 'b> Pass<'a, 'b> {
    fn new(placement: &'a Placement, claims: &'a mut Claims<'b>, is_cancelled: &'a IsCancelled) -> Self {
        Self {
            placement,
            claims,
            is_cancelled,
            scanned: 0,
            names: Names::default(),
            has_more_names: false,
            parents: Vec::new(),
            root: 0,
            owners: HashMap::new(),
            others: Held::default(),
            journal: Held::default(),
            metadata: Held::default(),
            unreadable: 0,
            first_unreadable: None,
            remark: None,
        }
    }

    /// Returns whether all was read, so that what has no owner is free.
    fn run(&mut self, disk: &Arc<dyn ReadAt>, partition: &Partition) -> Result<bool, Fault> {
        let mut file_system = open_for_scan(Bytes::new(Arc::clone(disk), partition))?;
        self.root = file_system.root_id();
        self.names = Names::new(self.root);
        self.remark = file_system.remark();
        let is_cancelled = Arc::clone(self.is_cancelled);
        let mut visits = Visits::new(move || is_cancelled());
        file_system.scan(&mut visits, &mut |scanned| self.add(scanned))?;
        Ok(self.unreadable == 0)
    }

    fn add(&mut self, scanned: Scanned) -> Result<(), Fault> {
        self.scanned += 1;
        if self.scanned.is_multiple_of(LOOK_SCANNED) && (self.is_cancelled)() {
            return Err(fault("the scan was cancelled"));
        }
        match scanned {
            Scanned::Run { bytes, owner } => {
                let held = claim(self.claims, self.placement, bytes);
                if held == Held::default() {
                    return Ok(());
                }
                let is_full = self.owners.len() >= OWNERS_MAX;
                match owner {
                    Owner::Journal => self.journal.plus(held),
                    Owner::Metadata => self.metadata.plus(held),
                    Owner::File(id) if is_full && !self.owners.contains_key(&id) => self.others.plus(held),
                    Owner::File(id) => self.owners.entry(id).or_default().plus(held),
                }
            }
            Scanned::Name { id, parent, name } => {
                if self.names.memory_bytes() >= NAMES_BYTES_MAX {
                    self.has_more_names = true;
                    return Ok(());
                }
                self.names.add(id, parent, &name)?;
                if self.parents.last() != Some(&parent) {
                    self.parents.push(parent);
                }
            }
            Scanned::Unreadable { id, why } => {
                self.unreadable += 1;
                self.first_unreadable.get_or_insert_with(|| format!("number {id}: {why}"));
            }
        }
        Ok(())
    }

    /// Adds what was found. Returns the sum, which is not whole if the scan was cancelled.
    fn take_into(self, partition: u32, contents: &mut Contents, remarks: &mut Vec<String>) -> Held {
        let Self { mut names, mut parents, root, owners, others, journal, metadata, is_cancelled, .. } = self;
        names.sort();
        parents.sort_unstable();
        parents.dedup();
        let mut sum = Held::default();
        for (class, held) in [(Class::Journal, journal), (Class::Metadata, metadata), (Class::File, others)] {
            contents.count(class, held);
            sum.plus(held);
        }
        if others != Held::default() {
            remarks.push(format!("files beyond the first {OWNERS_MAX} with changes are not listed"));
        }
        if self.has_more_names {
            let mib = NAMES_BYTES_MAX >> 20;
            remarks.push(format!("its names take more than {mib} MiB, so that many files have no path here"));
        }
        if let Some(first) = self.first_unreadable {
            let count = self.unreadable;
            remarks.push(format!("{count} of its files or directories cannot be read, the first is {first}"));
        }
        remarks.extend(self.remark);
        let mut directories: HashMap<u64, Held> = HashMap::new();
        let mut files = Vec::new();
        for (number, (id, held)) in owners.into_iter().enumerate() {
            if number.is_multiple_of(LOOK_OWNERS) && is_cancelled() {
                return sum;
            }
            sum.plus(held);
            let is_directory = id == root || parents.binary_search(&id).is_ok();
            if is_directory {
                contents.count(Class::File, held);
                directories.entry(id).or_default().plus(held);
            } else {
                files.push((id, held));
            }
            for directory in names.directories(id) {
                directories.entry(directory).or_default().plus(held);
            }
        }
        let item = |id, held, class| Item { partition, path: names.path(id), id, class, held };
        contents.files_total = contents.files_total.saturating_add(u64::try_from(files.len()).unwrap_or(0));
        let mut largest = Largest::default();
        files.sort_unstable_by_key(|(id, held)| (std::cmp::Reverse(held.total_bytes()), *id));
        for (id, held) in files {
            // A swap file is seldom small, and the path of each file is not worth its time.
            let is_shown = largest.takes_more();
            let path = if is_shown { names.path(id) } else { None };
            let is_swap = path.as_deref().is_some_and(is_swap_file);
            let class = if is_swap { Class::Swap } else { Class::File };
            contents.count(class, held);
            if is_shown {
                largest.add(Item { partition, path, id, class, held });
            }
        }
        contents.files.append(&mut largest.items);
        let mut largest = Largest::default();
        let mut directories: Vec<_> = directories.into_iter().collect();
        directories.sort_unstable_by_key(|(id, held)| (std::cmp::Reverse(held.total_bytes()), *id));
        for (id, held) in directories {
            if !largest.takes_more() {
                break;
            }
            largest.add(item(id, held, Class::File));
        }
        contents.directories.append(&mut largest.items);
        sum
    }
}

/// Swap files have these names on Windows in any case.
fn is_swap_file(path: &[u8]) -> bool {
    SWAP_FILES.iter().any(|name| path.eq_ignore_ascii_case(name.as_bytes()))
}

/// The first items, as far as their paths fit.
#[derive(Default)]
struct Largest {
    items: Vec<Item>,
    paths_bytes: usize,
}

impl Largest {
    /// The first of these.
    fn of(items: Vec<Item>) -> Vec<Item> {
        let mut largest = Self::default();
        for item in items {
            if !largest.takes_more() {
                break;
            }
            largest.add(item);
        }
        largest.items
    }

    fn takes_more(&self) -> bool {
        self.items.len() < ITEMS_MAX && self.paths_bytes < PATHS_BYTES_MAX
    }

    fn add(&mut self, item: Item) {
        self.paths_bytes += item.path.as_ref().map_or(0, Vec::len);
        self.items.push(item);
    }
}
