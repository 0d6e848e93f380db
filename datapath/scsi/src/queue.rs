//! The set of a logical unit's tasks that could not be executed at once: their order and their abort.
//!
//! | task | starts when no earlier task | ranges |
//! |---|---|---|
//! | simple | is ordered | overlaps, if one of the two is exclusive |
//! | ordered | exists | the same |
//! | head of queue | - | the same |
//!
//! COMPARE AND WRITE and ORWRITE are exclusive, because they read and then write. Commands that a device can
//! execute at once are not added; [`TaskSet::overtake`] and [`TaskSet::overtake_to_change`] say whether they
//! may be executed before the tasks in the set.
//!
//! # The fence
//! The fence is a read-write lock. A command that may change anything [passes](TaskSet::pass): it holds the
//! fence for reading from before its check of reservations and unit attentions until the device has executed
//! it or it is in the set. Two kinds of tasks take the fence for writing:
//! - An exclusive task, once before it starts: each change either saw the task, or has finished when the task
//!   starts to read.
//! - A command that aborts tasks of other initiators ([`TaskSet::close`]): PREEMPT AND ABORT and the task
//!   management functions. A command of those initiators has finished, or is in the set and aborted, or is
//!   checked afterwards. Without the fence, a command could pass its check, be suspended, and write after
//!   PREEMPT AND ABORT was answered.
//!
//! PREEMPT, CLEAR and RELEASE remove reservations and registrations, and end no tasks. They pass like a
//! change. A command that was found permitted before them is executed, even after they were answered, as is a
//! task that waits in the set. An initiator that wants such commands to end uses PREEMPT AND ABORT (SPC-4).
//!
//! Under the fence nothing waits for a device, no task starts and none is answered, because an answer may
//! call back into this module. Lock order: fence, then the set, reservations or attentions.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use headwater_block::ByteRange;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::link::NexusId;
use crate::task::{Arrival, Attribute, FunctionResult};

/// The most tasks of a logical unit that wait or run; further ones get TASK SET FULL.
const TASKS: usize = 4096;

/// How a task uses a part of the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It neither reads nor writes in a way that other tasks could disturb.
    Nothing,
    /// Writes it.
    Changes(ByteRange),
    /// Reads and then writes it, atomically.
    Exclusive(ByteRange),
}

impl Hold {
    fn collides(self, other: Hold) -> bool {
        match (self, other) {
            (Hold::Exclusive(a), Hold::Exclusive(b) | Hold::Changes(b))
            | (Hold::Changes(a), Hold::Exclusive(b)) => a.offset() < b.end() && b.offset() < a.end(),
            _ => false,
        }
    }
}

/// Calls a function when the aborted tasks have ended, which is when its last clone is dropped.
pub(crate) struct Waiter(Mutex<Option<DoneFn>>);

type DoneFn = Box<dyn FnOnce(FunctionResult) + Send>;

impl Waiter {
    pub(crate) fn new(done: impl FnOnce(FunctionResult) + Send + 'static) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(Box::new(done)))))
    }

    /// Calls the function now.
    pub(crate) fn answer(&self, result: FunctionResult) {
        let done = self.0.lock().take();
        if let Some(done) = done {
            done(result);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.answer(FunctionResult::Complete);
    }
}

/// Identifies a task in the set.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    id: u64,
    fate: Arc<AtomicU8>,
}

/// The state of a task: open, aborted, or its answer is on its way.
const OPEN: u8 = 0;
const ABORTED: u8 = 1;
const ANSWERED: u8 = 2;

impl Ticket {
    pub(crate) fn is_aborted(&self) -> bool {
        self.fate.load(Ordering::SeqCst) == ABORTED
    }

    /// Called before the task is answered: after that it cannot be aborted. `false`: it was aborted, and must
    /// not be answered.
    pub(crate) fn answer(&self) -> bool {
        self.seal(ANSWERED)
    }

    fn seal(&self, fate: u8) -> bool {
        match self.fate.compare_exchange(OPEN, fate, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => true,
            Err(before) => before == fate,
        }
    }
}

/// Starts a task; called without locks.
pub(crate) type Start = Box<dyn FnOnce(Ticket) + Send>;

/// The properties of a task that matter to the set.
pub(crate) struct Kind {
    pub(crate) nexus: NexusId,
    pub(crate) tag: u64,
    pub(crate) attribute: Attribute,
    pub(crate) hold: Hold,
}

struct Entry {
    ticket: Ticket,
    kind: Kind,
    /// Present until the task starts.
    start: Option<Start>,
    waiters: Vec<Arc<Waiter>>,
}

impl Entry {
    fn is_ordered(&self) -> bool {
        self.kind.attribute == Attribute::Ordered
    }

    fn is_exclusive(&self) -> bool {
        matches!(self.kind.hold, Hold::Exclusive(_))
    }

    /// Whether it must wait for `earlier`.
    fn waits_for(&self, earlier: &Entry) -> bool {
        let in_order =
            self.kind.attribute != Attribute::HeadOfQueue && (self.is_ordered() || earlier.is_ordered());
        in_order || self.kind.hold.collides(earlier.kind.hold)
    }
}

#[derive(Default)]
struct State {
    entries: Vec<Entry>,
    last_id: u64,
}

/// A task that may start now.
pub(crate) struct Startable {
    start: Start,
    ticket: Ticket,
    exclusive: bool,
}

/// Held by a command from its checks to its end or its addition to the set.
pub(crate) type Pass<'a> = RwLockReadGuard<'a, ()>;

/// While it is held, no command passes.
pub(crate) type Closed<'a> = RwLockWriteGuard<'a, ()>;

/// Tasks that were aborted.
#[derive(Default)]
pub(crate) struct Aborted {
    /// Aborted tasks that had not started: they end when they are started after the fence is open.
    pub(crate) waiting: Vec<Startable>,
    /// The nexuses of all aborted tasks.
    pub(crate) whose: HashSet<NexusId>,
    /// Whether the selection also met tasks whose answers are on their way.
    pub(crate) were_answered: bool,
}

/// The task set of a logical unit; see the module's documentation.
#[derive(Default)]
pub(crate) struct TaskSet {
    state: Mutex<State>,
    fence: RwLock<()>,
    /// The number of all tasks, of ordered ones, and of exclusive ones. A RAM hit checks only these.
    all: AtomicUsize,
    ordered: AtomicUsize,
    exclusive: AtomicUsize,
    /// How often all tasks were aborted, by resets and by CLEAR TASK SET; changed under the closed fence.
    resets: AtomicU64,
    clears: AtomicU64,
}

impl TaskSet {
    /// Whether a command that does not wait may be executed now.
    #[inline]
    pub(crate) fn overtake(&self, attribute: Attribute) -> bool {
        match attribute {
            Attribute::Ordered => self.all.load(Ordering::SeqCst) == 0,
            Attribute::HeadOfQueue => true,
            Attribute::Simple | Attribute::Aca => self.ordered.load(Ordering::Relaxed) == 0,
        }
    }

    /// Like [`TaskSet::overtake`], for a change that holds the fence.
    #[inline]
    pub(crate) fn overtake_to_change(&self, attribute: Attribute, _: &Pass<'_>) -> bool {
        self.overtake(attribute) && self.exclusive.load(Ordering::SeqCst) == 0
    }

    /// Lets a command pass the fence. Called before the command is checked; the result is held until the
    /// command is executed or [added](TaskSet::add).
    #[inline]
    pub(crate) fn pass(&self) -> Pass<'_> {
        self.fence.read()
    }

    /// Closes the fence: waits for all commands that pass, and stops new ones.
    pub(crate) fn close(&self) -> Closed<'_> {
        self.fence.write()
    }

    /// Records that a reset aborts all tasks, including those that the transport has not given to the unit
    /// yet.
    pub(crate) fn note_reset(&self, _: &Closed<'_>) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }

    /// Like [`TaskSet::note_reset`], for CLEAR TASK SET.
    pub(crate) fn note_clear(&self, _: &Closed<'_>) {
        self.clears.fetch_add(1, Ordering::SeqCst);
    }

    /// The state to which a command that arrives now is compared when the transport gives it to the unit.
    #[inline]
    pub(crate) fn arrival(&self) -> Arrival {
        Arrival { resets: self.resets.load(Ordering::SeqCst), clears: self.clears.load(Ordering::SeqCst) }
    }

    /// Whether no more tasks should be added. (Each thread that checks at the same time may still add one.)
    pub(crate) fn is_full(&self) -> bool {
        self.all.load(Ordering::Relaxed) >= TASKS
    }

    /// Adds a task, and returns it for starting unless it has to wait.
    pub(crate) fn add(&self, kind: Kind, start: Start, _: &Pass<'_>) -> Option<Startable> {
        let mut state = self.state.lock();
        state.last_id = state.last_id.wrapping_add(1);
        let ticket = Ticket { id: state.last_id, fate: Arc::default() };
        let mut entry = Entry { ticket, kind, start: Some(start), waiters: Vec::new() };
        self.count(&entry);
        let waits = state.entries.iter().any(|earlier| entry.waits_for(earlier));
        let now = if waits { None } else { startable(&mut entry) };
        state.entries.push(entry);
        now
    }

    /// Starts a task that [`TaskSet::add`], [`TaskSet::finish`] or [`TaskSet::abort`] returned; not under the
    /// fence.
    pub(crate) fn start(&self, startable: Startable) {
        if startable.exclusive {
            // After this, changes that did not see the task have finished.
            drop(self.fence.write());
        }
        (startable.start)(startable.ticket);
    }

    /// Removes a task after it was answered. A function that aborts tasks in this moment waits for it, and is
    /// answered later. The caller drops the waiters and starts the returned tasks.
    pub(crate) fn finish(&self, ticket: &Ticket) -> (Vec<Arc<Waiter>>, Vec<Startable>) {
        let mut state = self.state.lock();
        let Some(place) = state.entries.iter().position(|e| e.ticket.id == ticket.id) else {
            return (Vec::new(), Vec::new());
        };
        let entry = state.entries.remove(place);
        self.uncount(&entry);
        let mut ready = Vec::new();
        for place in 0..state.entries.len() {
            let Some((earlier, [entry, ..])) = state.entries.split_at_mut_checked(place) else { break };
            if entry.start.is_some() && !earlier.iter().any(|earlier| entry.waits_for(earlier)) {
                ready.extend(startable(entry));
            }
        }
        drop(state);
        (entry.waiters, ready)
    }

    /// Aborts the tasks that `is_meant` selects by nexus and tag. Tasks that are being answered are waited
    /// for, not aborted.
    pub(crate) fn abort(
        &self,
        is_meant: impl Fn(NexusId, u64) -> bool,
        waiter: Option<&Arc<Waiter>>,
    ) -> Aborted {
        let mut state = self.state.lock();
        let mut aborted = Aborted::default();
        for entry in state.entries.iter_mut().filter(|e| is_meant(e.kind.nexus, e.kind.tag)) {
            entry.waiters.extend(waiter.cloned());
            if !entry.ticket.seal(ABORTED) {
                aborted.were_answered = true;
                continue;
            }
            aborted.whose.insert(entry.kind.nexus);
            let waits = startable(entry).map(|startable| Startable { exclusive: false, ..startable });
            aborted.waiting.extend(waits);
        }
        aborted
    }

    fn count(&self, entry: &Entry) {
        self.all.fetch_add(1, Ordering::SeqCst);
        if entry.is_ordered() {
            self.ordered.fetch_add(1, Ordering::SeqCst);
        }
        if entry.is_exclusive() {
            self.exclusive.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn uncount(&self, entry: &Entry) {
        self.all.fetch_sub(1, Ordering::SeqCst);
        if entry.is_ordered() {
            self.ordered.fetch_sub(1, Ordering::SeqCst);
        }
        if entry.is_exclusive() {
            self.exclusive.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Takes the function that starts the task.
fn startable(entry: &mut Entry) -> Option<Startable> {
    let start = entry.start.take()?;
    Some(Startable { start, ticket: entry.ticket.clone(), exclusive: entry.is_exclusive() })
}

impl std::fmt::Debug for TaskSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskSet").field("tasks", &self.all).finish_non_exhaustive()
    }
}
