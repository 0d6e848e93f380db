//! Cleans up after processes that served attached devices (`headwater attach`) and died: orphaned devices, their
//! records, and notes about devices that were about to be attached. `attach` and `detach` call it.
//!
//! | the device | is | its record |
//! |---|---|---|
//! | is ours and waits for a server | kept | kept |
//! | is ours, but its server cannot return, because its cache was created anew | removed | removed |
//! | is ours in any other state | removed | removed |
//! | does not exist any more (the kernel has ended it) | - | removed |
//! | belongs to another program now | kept | removed |
//! | cannot be identified or removed | kept | kept, because without it nothing would find the device again |

use std::path::Path;
use std::time::Duration;

use headwater_attach::{Intent, Mark, Owner, Record, Registry, Way, find, is_waiting, remove};

/// Timeout of the lock for records, which other processes hold only briefly.
pub const RECORDS_TIMEOUT: Duration = Duration::from_secs(30);

/// The directory with the users' own names of devices.
pub const NAMES_DIR: &str = "/dev/headwater";

/// What to do with a device that waits for a server, when a server starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrphanAction {
    /// This server resumes it.
    GoesOn,
    /// It waits for another server.
    Waits,
    /// Its cache was replaced by another one, so no server can resume it.
    Ends,
}

impl OrphanAction {
    /// The action if `identity` is served with a cache in this directory.
    pub fn of(record: &Record, identity: &str, kept_in: Option<&Path>) -> Self {
        if record.identity == identity {
            Self::GoesOn
        } else if kept_in.is_some() && record.kept_in.as_deref() == kept_in {
            Self::Ends
        } else {
            Self::Waits
        }
    }
}

/// The kernel's operations, as a trait for tests.
pub trait Devices {
    fn is_waiting(&self, record: &Record) -> Option<bool>;
    fn remove(&self, way: Way, number: u32, mark: &Mark) -> Owner;
    fn find(&self, way: Way, mark: &Mark) -> std::io::Result<Vec<(u32, Owner)>>;
}

/// The kernel's operations.
pub struct KernelDevices;

impl Devices for KernelDevices {
    fn is_waiting(&self, record: &Record) -> Option<bool> {
        is_waiting(record.way, record.number, &record.mark())
    }

    fn remove(&self, way: Way, number: u32, mark: &Mark) -> Owner {
        remove(way, number, mark)
    }

    fn find(&self, way: Way, mark: &Mark) -> std::io::Result<Vec<(u32, Owner)>> {
        find(way, mark)
    }
}

/// Cleans up after dead servers, except for devices that wait for a server. Returns the first of these that this
/// server resumes.
pub fn clear_all(
    registry: &Registry,
    devices: &impl Devices,
    fate: impl Fn(&Record) -> OrphanAction,
) -> std::io::Result<Option<Record>> {
    let mut waiting = None;
    for record in registry.all()?.into_iter().filter(|record| !record.is_served()) {
        match if record.survives { devices.is_waiting(&record) } else { Some(false) } {
            Some(true) => match fate(&record) {
                OrphanAction::GoesOn if waiting.is_none() => waiting = Some(record),
                OrphanAction::GoesOn | OrphanAction::Waits => {}
                OrphanAction::Ends => {
                    let dir = record.kept_in.as_deref().unwrap_or(Path::new("")).display();
                    tracing::warn!(
                        "removing {}: it waited for the persistent cache in {dir}, which was replaced by another cache",
                        record.device()
                    );
                    let _ = clear(registry, devices, &record);
                }
            },
            Some(false) => drop(clear(registry, devices, &record)),
            None => tracing::warn!("{}", kept(&record)),
        }
    }
    for intent in registry.intents()?.into_iter().filter(|intent| !intent.mark.is_alive()) {
        clear_intended(registry, devices, &intent)?;
    }
    Ok(waiting)
}

/// Removes a device if the process that served it died before it recorded the device.
fn clear_intended(registry: &Registry, devices: &impl Devices, intent: &Intent) -> std::io::Result<()> {
    let found = devices.find(intent.way, &intent.mark)?;
    // Read after the note, whose server was dead by then, so a record that it wrote meanwhile is not missed.
    let records = registry.all()?;
    let mut is_settled = true;
    for (number, owner) in found {
        if records.iter().any(|record| (record.way, record.number) == (intent.way, number)) {
            continue;
        }
        let device = intent.way.device(number);
        if owner == Owner::Ours && devices.remove(intent.way, number, &intent.mark) != Owner::Unknown {
            tracing::warn!(
                "removed {device}: the process that served it died before it had recorded the device"
            );
        } else {
            tracing::warn!(
                "{device} may be left from a process that died before it recorded the device, and could not be removed; \
                 the next attach tries again"
            );
            is_settled = false;
        }
    }
    if is_settled { registry.settle(intent) } else { Ok(()) }
}

/// Removes the note of a failed attach, unless its device may still exist: then the next attach finds it through the
/// note.
pub fn settle_unless_left(
    registry: &Registry,
    devices: &impl Devices,
    intent: &Intent,
) -> std::io::Result<()> {
    let left = devices.find(intent.way, &intent.mark)?;
    for (number, _) in &left {
        tracing::warn!(
            "{} may be left from a failed attach, and could not be removed; the next attach tries again",
            intent.way.device(*number)
        );
    }
    if left.is_empty() { registry.settle(intent) } else { Ok(()) }
}

/// Removes the device and record of a dead server, and prints that. A device that belongs to another program stays.
/// [`Owner::Unknown`] means that the device may still exist, and its record stays.
pub fn clear(registry: &Registry, devices: &impl Devices, record: &Record) -> Owner {
    let owner = devices.remove(record.way, record.number, &record.mark());
    match owner {
        // If the kernel has ended it, only the record is removed.
        Owner::Ours | Owner::Nobody => {
            tracing::warn!("removed {}: its server died, and its data is lost", record.device());
        }
        Owner::Others => {
            tracing::warn!(
                "did not remove {}: it now belongs to another program, not to the server that died",
                record.device()
            );
        }
        Owner::Unknown => tracing::warn!("{}", kept(record)),
    }
    if owner != Owner::Unknown {
        forget(registry, record);
    }
    owner
}

/// The message if a record is kept.
pub fn kept(record: &Record) -> String {
    format!(
        "cannot identify or remove {}, so the device and its record stay; the next attach or detach tries again",
        record.device()
    )
}

/// Removes the record of a device that is not ours any more, and its name. Its number and name may belong to another
/// server by now.
pub fn forget(registry: &Registry, record: &Record) {
    let lock = registry.lock_records(RECORDS_TIMEOUT);
    let forgotten = lock.and_then(|lock| Ok(registry.forget(record)?.then_some(lock)));
    let _lock = match forgotten {
        Ok(Some(lock)) => lock,
        Ok(None) => return,
        Err(error) => {
            tracing::warn!("cannot remove the record of {}: {error}", record.device());
            return;
        }
    };
    if let Some(name) = &record.name {
        let link = Path::new(NAMES_DIR).join(name);
        if std::fs::read_link(&link).is_ok_and(|target| target == Path::new(&record.device())) {
            let _ = std::fs::remove_file(link);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A fake kernel with one answer for every device.
    struct Answers<'a> {
        waiting: Option<bool>,
        owner: Owner,
        /// Called while devices are searched.
        meanwhile: &'a dyn Fn(),
        removed: RefCell<Vec<u32>>,
    }

    impl Devices for Answers<'_> {
        fn is_waiting(&self, _: &Record) -> Option<bool> {
            self.waiting
        }

        fn remove(&self, _: Way, number: u32, _: &Mark) -> Owner {
            self.removed.borrow_mut().push(number);
            self.owner
        }

        fn find(&self, _: Way, _: &Mark) -> std::io::Result<Vec<(u32, Owner)>> {
            (self.meanwhile)();
            let is_found = matches!(self.owner, Owner::Ours | Owner::Unknown);
            Ok(is_found.then_some((4, self.owner)).into_iter().collect())
        }
    }

    fn answers(waiting: Option<bool>, owner: Owner) -> Answers<'static> {
        Answers { waiting, owner, meanwhile: &|| {}, removed: RefCell::default() }
    }

    /// The mark of a dead process.
    fn mark() -> Mark {
        let mark = Mark::of_this_thread();
        Mark { started: mark.started + 1, ..mark }
    }

    fn record(number: u32, survives: bool) -> Record {
        let record =
            Record::of_this_process(Way::Ublk, number, None, "null:1M".into(), "id".into(), survives);
        let mark = mark();
        Record { started: mark.started, made_by: Some(mark), ..record }
    }

    #[test]
    fn a_record_is_kept_where_the_kernel_does_not_say_whose_the_device_is() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let cases = [
            // Whether it may survive, whether it waits, its owner; expected: whether the record stays, whether a
            // removal was tried.
            (false, Some(false), Owner::Unknown, true, true),
            (true, None, Owner::Ours, true, false),
            (true, Some(true), Owner::Ours, true, false),
            (true, Some(false), Owner::Unknown, true, true),
            (true, Some(false), Owner::Ours, false, true),
            (false, Some(true), Owner::Ours, false, true),
            (false, Some(false), Owner::Others, false, true),
            (false, Some(false), Owner::Nobody, false, true),
        ];
        for (survives, waiting, owner, is_kept, is_tried) in cases {
            let case = (survives, waiting, owner);
            let left = record(3, survives);
            registry.record(&left).unwrap();
            let devices = answers(waiting, owner);
            let wanted = clear_all(&registry, &devices, |_| OrphanAction::GoesOn).unwrap();
            assert_eq!(wanted.is_some(), survives && waiting == Some(true), "{case:?}");
            assert_eq!(registry.all().unwrap().contains(&left), is_kept, "{case:?}");
            assert_eq!(!devices.removed.take().is_empty(), is_tried, "{case:?}");
            registry.forget(&left).unwrap();
        }
    }

    #[test]
    fn a_device_goes_on_with_the_cache_that_it_had_and_with_no_other_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let left = Record { kept_in: Some("/cache/lab".into()), ..record(3, true) };
        let cases = [
            (&left, "id", "/cache/lab", OrphanAction::GoesOn),
            // The directory was moved.
            (&left, "id", "/elsewhere/lab", OrphanAction::GoesOn),
            // It was removed, and the cache made anew.
            (&left, "other", "/cache/lab", OrphanAction::Ends),
            // Another cache of the same name.
            (&left, "other", "/elsewhere/lab", OrphanAction::Waits),
        ];
        for (left, identity, kept_in, expected) in cases {
            registry.record(left).unwrap();
            let devices = answers(Some(true), Owner::Ours);
            let fate = |record: &Record| OrphanAction::of(record, identity, Some(Path::new(kept_in)));
            let waiting = clear_all(&registry, &devices, fate).unwrap();
            assert_eq!(waiting.is_some(), expected == OrphanAction::GoesOn, "{identity} in {kept_in}");
            assert_eq!(
                devices.removed.take().is_empty(),
                expected != OrphanAction::Ends,
                "{identity} in {kept_in}"
            );
            assert_eq!(
                registry.all().unwrap().is_empty(),
                expected == OrphanAction::Ends,
                "{identity} in {kept_in}"
            );
        }
    }

    #[test]
    fn what_was_intended_is_settled_when_its_device_is_known_to_be_gone() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let intent = Intent { way: Way::Ublk, mark: mark() };
        registry.intend(&intent).unwrap();
        clear_all(&registry, &answers(None, Owner::Unknown), |_| OrphanAction::GoesOn).unwrap();
        assert_eq!(registry.intents().unwrap(), [intent]);
        let devices = answers(None, Owner::Ours);
        clear_all(&registry, &devices, |_| OrphanAction::GoesOn).unwrap();
        assert_eq!((devices.removed.take(), registry.intents().unwrap()), (vec![4], vec![]));
    }

    #[test]
    fn what_was_attached_in_vain_is_settled_only_when_no_device_of_it_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let intent = Intent { way: Way::Ublk, mark: mark() };
        registry.intend(&intent).unwrap();
        for owner in [Owner::Ours, Owner::Unknown] {
            settle_unless_left(&registry, &answers(None, owner), &intent).unwrap();
            assert_eq!(registry.intents().unwrap(), std::slice::from_ref(&intent), "{owner:?}");
        }
        settle_unless_left(&registry, &answers(None, Owner::Nobody), &intent).unwrap();
        assert_eq!(registry.intents().unwrap(), []);
    }

    #[test]
    fn a_device_that_its_maker_recorded_before_it_died_is_not_taken_for_an_unrecorded_one() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        registry.intend(&Intent { way: Way::Ublk, mark: mark() }).unwrap();
        // The last thing that it did, and nobody had seen a record of it until then.
        let meanwhile = || registry.record(&record(4, true)).unwrap();
        let devices = Answers { meanwhile: &meanwhile, ..answers(Some(true), Owner::Ours) };
        clear_all(&registry, &devices, |_| OrphanAction::GoesOn).unwrap();
        assert!(devices.removed.take().is_empty());
        assert_eq!(registry.all().unwrap(), [record(4, true)]);
        assert_eq!(registry.intents().unwrap(), []);
    }
}
