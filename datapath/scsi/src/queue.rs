//! The tasks of a logical unit that could not be carried out at once: their order, and their end before time.
//!
//! | task | starts when no earlier task | ranges |
//! |---|---|---|
//! | simple | is ordered | overlaps, where one of the two is exclusive |
//! | ordered | is there at all | the same |
//! | head of queue | - | the same |
//!
//! Exclusive are COMPARE AND WRITE and ORWRITE, which read and then write. Commands that a device can carry out at
//! once never come here; [`TaskSet::overtake`] and [`TaskSet::overtake_to_change`] tell them whether they may pass.
//!
//! # The fence
//! A command that may change something [passes](TaskSet::pass): it holds the fence for reading from before reservations and
//! unit attentions are looked at until the device has carried it out, or until it is in the set. Two take the fence for
//! writing:
//! - an exclusive task, once before it starts: a change either saw it, or is over when it starts to read;
//! - whoever ends tasks of others ([`TaskSet::close`]), PREEMPT AND ABORT and the task management functions: a command of these
//!   either is over, or in the set and aborted, or is looked at afterwards. Without that, one that was found allowed and then
//!   slept would write after PREEMPT AND ABORT was answered.
//!
//! PREEMPT, CLEAR and RELEASE take reservations and registrations away, and end no tasks: they pass like a change. What was found
//! allowed before them is carried out, also after they were answered, as is what waits in the set; who wants it to end asks for
//! PREEMPT AND ABORT (SPC-4).
//!
//! Under the fence nothing waits for a device, no task starts and none is answered, for answers may come back here. Lock
//! order: fence, then the set, reservations or attentions.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use headwater_block::ByteRange;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::link::NexusId;
use crate::task::{Arrival, Attribute, FunctionResult};

/// Most tasks of a logical unit that wait or run; more are answered with TASK SET FULL.
const TASKS: usize = 4096;

/// What a task does to a part of the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Nothing that others could disturb.
    Nothing,
    /// Writes it.
    Changes(ByteRange),
    /// Reads and then writes it, as one step.
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

/// Who is told when tasks that were aborted have ended: when the last clone is dropped.
pub(crate) struct Waiter(Mutex<Option<Told>>);

type Told = Box<dyn FnOnce(FunctionResult) + Send>;

impl Waiter {
    pub(crate) fn new(done: impl FnOnce(FunctionResult) + Send + 'static) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(Box::new(done)))))
    }

    /// Answers now.
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

/// A task's place in the set.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    id: u64,
    fate: Arc<AtomicU8>,
}

/// What became of a task: nothing yet, aborted, or its answer is on its way.
const OPEN: u8 = 0;
const ABORTED: u8 = 1;
const ANSWERED: u8 = 2;

impl Ticket {
    pub(crate) fn is_aborted(&self) -> bool {
        self.fate.load(Ordering::SeqCst) == ABORTED
    }

    /// Before the task is answered: it cannot be aborted any more. `false`: it was, and nothing is to be told.
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

/// What a task is, for the set.
pub(crate) struct Kind {
    pub(crate) nexus: NexusId,
    pub(crate) tag: u64,
    pub(crate) attribute: Attribute,
    pub(crate) hold: Hold,
}

struct Entry {
    ticket: Ticket,
    kind: Kind,
    /// Until it starts.
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

/// A command on its way from being looked at to its end or its place in the set.
pub(crate) type Pass<'a> = RwLockReadGuard<'a, ()>;

/// No command is on its way.
pub(crate) type Closed<'a> = RwLockWriteGuard<'a, ()>;

/// Tasks that were aborted.
#[derive(Default)]
pub(crate) struct Aborted {
    /// Those that waited: to be started once the fence is open, which ends them.
    pub(crate) waiting: Vec<Startable>,
    /// Whose they all were.
    pub(crate) whose: HashSet<NexusId>,
    /// Whether others were meant too, whose answers are on their way.
    pub(crate) were_answered: bool,
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct TaskSet {
    state: Mutex<State>,
    fence: RwLock<()>,
    /// How many there are, how many of them are ordered, and exclusive: what a hit looks at.
    all: AtomicUsize,
    ordered: AtomicUsize,
    exclusive: AtomicUsize,
    /// How often all tasks were ended, by resets and by CLEAR TASK SET; changed under the closed fence.
    resets: AtomicU64,
    clears: AtomicU64,
}

impl TaskSet {
    /// Whether a command that does not wait may be carried out now.
    #[inline]
    pub(crate) fn overtake(&self, attribute: Attribute) -> bool {
        match attribute {
            Attribute::Ordered => self.all.load(Ordering::SeqCst) == 0,
            Attribute::HeadOfQueue => true,
            Attribute::Simple | Attribute::Aca => self.ordered.load(Ordering::Relaxed) == 0,
        }
    }

    /// The same for a change, which has passed.
    #[inline]
    pub(crate) fn overtake_to_change(&self, attribute: Attribute, _: &Pass<'_>) -> bool {
        self.overtake(attribute) && self.exclusive.load(Ordering::SeqCst) == 0
    }

    /// Before a command is looked at; to be kept until it is carried out or [added](TaskSet::add).
    #[inline]
    pub(crate) fn pass(&self) -> Pass<'_> {
        self.fence.read()
    }

    /// Waits for all that pass, and keeps others from it.
    pub(crate) fn close(&self) -> Closed<'_> {
        self.fence.write()
    }

    /// All tasks are ended by a reset, those too that the transport has not handed over yet.
    pub(crate) fn note_reset(&self, _: &Closed<'_>) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }

    /// The same by CLEAR TASK SET.
    pub(crate) fn note_clear(&self, _: &Closed<'_>) {
        self.clears.fetch_add(1, Ordering::SeqCst);
    }

    /// What a command that comes now is compared with when it is handed over.
    #[inline]
    pub(crate) fn arrival(&self) -> Arrival {
        Arrival { resets: self.resets.load(Ordering::SeqCst), clears: self.clears.load(Ordering::SeqCst) }
    }

    /// Whether no more tasks should be added. (One for each thread that asks may still be.)
    pub(crate) fn is_full(&self) -> bool {
        self.all.load(Ordering::Relaxed) >= TASKS
    }

    /// Adds a task, and gives it back to be started unless it has to wait.
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

    /// Starts what [`TaskSet::add`], [`TaskSet::finish`] and [`TaskSet::abort`] gave; not under the fence.
    pub(crate) fn start(&self, startable: Startable) {
        if startable.exclusive {
            // Changes that did not see it are over after this.
            drop(self.fence.write());
        }
        (startable.start)(startable.ticket);
    }

    /// Removes a task after its answer was given: whoever ends tasks until then waits for it, and is answered later. The waiters are
    /// to be dropped, the rest started.
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

    /// Aborts the tasks that `is_meant` picks by nexus and tag; for those that are being answered it only waits.
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

/// Takes what starts the task.
fn startable(entry: &mut Entry) -> Option<Startable> {
    let start = entry.start.take()?;
    Some(Startable { start, ticket: entry.ticket.clone(), exclusive: entry.is_exclusive() })
}

impl std::fmt::Debug for TaskSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskSet").field("tasks", &self.all).finish_non_exhaustive()
    }
}
