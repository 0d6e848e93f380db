//! A memory budget for requests in progress, shared by all connections of a server.
//!
//! Requests are of two kinds. *Stores* write data, and may wait for space in the device without a limit of
//! time. The others, such as reads, end soon.
//!
//! | the connection's requests of one kind take | more memory is granted |
//! |---|---|
//! | at most [`OWN_BYTES`] with the new request | at once, from the connection's own part |
//! | at most [`OWN_BYTES`] now, but more with the new request | when the shared part has space for it, first come, first served; the connection's thread is then woken |
//! | more than [`OWN_BYTES`] now | if no other connection waits, and at least as much stays free as the connection holds already; otherwise it asks again after one of its own requests has ended |
//!
//! So a connection waits for others only while it has nothing of the shared part, a connection that holds
//! much leaves space for each new one, and small requests proceed whatever others do. Each kind may take at
//! most three quarters of the budget. So reads pass writes that wait, and writes finish although others read
//! without pause. A request that is longer than three quarters is counted as three quarters.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::range::MAX_REQUEST_BYTES;

/// The part of each connection and kind that is not shared.
pub const OWN_BYTES: u64 = 256 << 10;

/// The memory that the connections of one server share, in bytes.
pub struct Budget {
    limit: u64,
    /// Bytes in use: by requests that do not store data, and by stores.
    used: Mutex<[u64; 2]>,
    others: Queue,
    stores: Queue,
}

/// The connections that wait for memory for requests of one kind.
#[derive(Default)]
struct Queue {
    /// The length of `waiters`.
    count: AtomicUsize,
    waiters: Mutex<VecDeque<Arc<Waiter>>>,
}

struct Waiter {
    bytes: u64,
    granted: AtomicU64,
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl Budget {
    /// Creates a budget of at least the size of two of the longest requests.
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        let limit = limit_bytes.max(2 * u64::from(MAX_REQUEST_BYTES));
        Arc::new(Self { limit, used: Mutex::default(), others: Queue::default(), stores: Queue::default() })
    }

    /// The bytes in use now.
    pub fn used_bytes(&self) -> u64 {
        self.used.lock().iter().sum()
    }

    /// The most that requests of one kind may use.
    fn most(&self) -> u64 {
        self.limit - self.limit / 4
    }

    /// Returns the share of a new connection. `wake` wakes its thread, which must then ask again.
    pub fn share(self: &Arc<Self>, wake: impl Fn() + Send + Sync + 'static) -> Share {
        Share {
            budget: Arc::clone(self),
            wake: Arc::new(wake),
            others: Part::default(),
            stores: Part::default(),
        }
    }

    fn queue(&self, stores: bool) -> &Queue {
        if stores { &self.stores } else { &self.others }
    }

    /// Takes `bytes` if `bytes + besides` are free for that kind.
    fn claim(&self, bytes: u64, besides: u64, stores: bool) -> bool {
        let mut used = self.used.lock();
        let [others, stored] = &mut *used;
        let (of_kind, of_other) = if stores { (stored, *others) } else { (others, *stored) };
        let with_all = of_kind.saturating_add(bytes).saturating_add(besides);
        let fits = with_all <= self.most() && with_all.saturating_add(of_other) <= self.limit;
        if fits {
            *of_kind = of_kind.saturating_add(bytes);
        }
        fits
    }

    fn release(&self, bytes: u64, stores: bool) {
        if bytes == 0 {
            return;
        }
        {
            let mut used = self.used.lock();
            let [others, stored] = &mut *used;
            let of_kind = if stores { stored } else { others };
            *of_kind = of_kind.saturating_sub(bytes);
        }
        // A connection that starts to wait increments `count` first and checks the free memory afterwards, so
        // that one of the two threads sees the other.
        self.serve(true);
        self.serve(false);
    }

    /// Grants freed memory to the waiting connections.
    fn serve(&self, stores: bool) {
        let queue = self.queue(stores);
        let mut served = Vec::new();
        if queue.count.load(Ordering::SeqCst) > 0 {
            let mut waiters = queue.waiters.lock();
            while let Some(waiter) = waiters.pop_front_if(|waiter| self.claim(waiter.bytes, 0, stores)) {
                queue.count.fetch_sub(1, Ordering::SeqCst);
                waiter.granted.store(waiter.bytes, Ordering::SeqCst);
                served.push(waiter);
            }
        }
        served.iter().for_each(|waiter| (waiter.wake)());
    }
}

/// The memory of one connection. It is returned when this is dropped.
pub struct Share {
    budget: Arc<Budget>,
    wake: Arc<dyn Fn() + Send + Sync>,
    others: Part,
    stores: Part,
}

#[derive(Default)]
struct Part {
    used: u64,
    /// Shared bytes: `used` beyond [`OWN_BYTES`], and bytes that were granted and are not used yet.
    taken: u64,
    waiter: Option<Arc<Waiter>>,
}

impl Part {
    fn beyond(used: u64) -> u64 {
        used.saturating_sub(OWN_BYTES)
    }
}

impl Share {
    /// Takes `bytes` for a request. `stores`: the request writes data. Returns `false` if no memory is
    /// available now: ask again after [`Share::give`], or when this connection was woken.
    #[inline]
    pub fn take(&mut self, bytes: u64, stores: bool) -> bool {
        let part = if stores { &mut self.stores } else { &mut self.others };
        let used = part.used.saturating_add(bytes);
        if Part::beyond(used) <= part.taken || self.take_shared(used, stores) {
            self.part(stores).used = used;
            return true;
        }
        false
    }

    /// Takes `bytes` for data that has already arrived and cannot wait: if it fits, it is granted even if
    /// others wait, and without a limit for this connection. Use it only on a budget for such data, because
    /// it can leave nothing for connections that wait.
    pub fn take_unasked(&mut self, bytes: u64, stores: bool) -> bool {
        self.collect(stores);
        let budget = Arc::clone(&self.budget);
        let part = self.part(stores);
        let used = part.used.saturating_add(bytes);
        let more = Part::beyond(used).saturating_sub(part.taken);
        if more > 0 && !budget.claim(more, 0, stores) {
            return false;
        }
        part.taken = part.taken.saturating_add(more);
        part.used = used;
        true
    }

    fn take_shared(&mut self, used: u64, stores: bool) -> bool {
        self.collect(stores);
        let budget = Arc::clone(&self.budget);
        let wake = Arc::clone(&self.wake);
        let part = self.part(stores);
        let beyond = Part::beyond(used).min(budget.most());
        let more = beyond.saturating_sub(part.taken);
        let is_first = part.used <= OWN_BYTES;
        if more == 0 {
            // A request that is counted as the whole limit cannot leave anything free.
            return is_first || beyond == Part::beyond(used);
        }
        let queue = budget.queue(stores);
        let besides = if is_first { 0 } else { part.taken };
        if queue.count.load(Ordering::SeqCst) == 0 && budget.claim(more, besides, stores) {
            part.taken = beyond;
            return true;
        }
        if !is_first || part.waiter.is_some() {
            return false;
        }
        // Memory granted for a shorter request would be held while this one waits.
        budget.release(std::mem::take(&mut part.taken), stores);
        let waiter = Arc::new(Waiter { bytes: beyond, granted: AtomicU64::new(0), wake });
        part.waiter = Some(Arc::clone(&waiter));
        {
            let mut waiters = queue.waiters.lock();
            waiters.push_back(waiter);
            queue.count.fetch_add(1, Ordering::SeqCst);
        }
        // Memory may have become free in between.
        budget.serve(stores);
        self.collect(stores);
        self.part(stores).taken >= beyond
    }

    /// Returns the memory of a request that has ended.
    #[inline]
    pub fn give(&mut self, bytes: u64, stores: bool) {
        let part = self.part(stores);
        part.used = part.used.saturating_sub(bytes);
        if part.taken > 0 {
            self.settle_part(stores);
        }
    }

    /// Takes over memory that was granted to waiting requests, and returns whether there was any. The
    /// requests must then ask again, and the caller must call [`Share::settle`] afterwards.
    pub fn is_granted(&mut self) -> bool {
        let stores = self.collect(true);
        self.collect(false) || stores
    }

    /// Returns memory that was granted to requests that no longer exist.
    pub fn settle(&mut self) {
        // Except for memory granted just now: otherwise no request would ask for it again.
        self.settle_part(true);
        self.settle_part(false);
    }

    /// Stops waiting, because the request got enough memory from this connection's other requests, or no
    /// longer exists.
    pub fn withdraw(&mut self) {
        self.leave(true);
        self.leave(false);
    }

    /// Whether a request of this connection waits, and was or will be woken.
    pub fn is_waiting(&self) -> bool {
        self.others.waiter.is_some() || self.stores.waiter.is_some()
    }

    /// Whether other connections wait for memory that this one holds for that kind of request.
    pub fn is_wanted(&self, stores: bool) -> bool {
        let part = if stores { &self.stores } else { &self.others };
        part.taken > 0 && self.budget.queue(stores).count.load(Ordering::SeqCst) > 0
    }

    fn part(&mut self, stores: bool) -> &mut Part {
        if stores { &mut self.stores } else { &mut self.others }
    }

    /// Takes over granted memory, if there is any.
    fn collect(&mut self, stores: bool) -> bool {
        let part = self.part(stores);
        let granted = part.waiter.as_ref().map_or(0, |waiter| waiter.granted.swap(0, Ordering::SeqCst));
        if granted > 0 {
            part.taken = part.taken.saturating_add(granted);
            part.waiter = None;
        }
        granted > 0
    }

    fn settle_part(&mut self, stores: bool) {
        let part = self.part(stores);
        let keep = Part::beyond(part.used).min(part.taken);
        let surplus = part.taken.saturating_sub(keep);
        part.taken = keep;
        self.budget.release(surplus, stores);
    }

    fn leave(&mut self, stores: bool) {
        if let Some(waiter) = self.part(stores).waiter.clone() {
            let queue = self.budget.queue(stores);
            let mut waiters = queue.waiters.lock();
            let before = waiters.len();
            waiters.retain(|other| !Arc::ptr_eq(other, &waiter));
            queue.count.fetch_sub(before.saturating_sub(waiters.len()), Ordering::SeqCst);
        }
        // After it has left the queue, nothing can be granted to it.
        self.collect(stores);
        self.part(stores).waiter = None;
        self.settle_part(stores);
        // Requests further back in the queue may need less.
        self.budget.serve(stores);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        for stores in [true, false] {
            self.part(stores).used = 0;
            self.leave(stores);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn counted(budget: &Arc<Budget>) -> (Share, Arc<AtomicUsize>) {
        let woken = Arc::new(AtomicUsize::new(0));
        let share = {
            let woken = Arc::clone(&woken);
            budget.share(move || {
                woken.fetch_add(1, Ordering::SeqCst);
            })
        };
        (share, woken)
    }

    #[test]
    fn small_requests_take_nothing_that_is_shared() {
        let budget = Budget::new(64 * MIB);
        let (mut greedy, _) = counted(&budget);
        assert!(greedy.take(48 * MIB + OWN_BYTES, false) && greedy.take(16 * MIB + OWN_BYTES, true));
        let (mut small, _) = counted(&budget);
        let before = budget.used_bytes();
        for stores in [true, false] {
            assert!(small.take(OWN_BYTES, stores));
            assert!(!small.take(1, stores));
            small.give(OWN_BYTES, stores);
        }
        assert_eq!(budget.used_bytes(), before);
        drop((greedy, small));
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn stores_leave_a_quarter_and_each_owner_half_the_rest() {
        let budget = Budget::new(256 * MIB);
        let mut shares: Vec<Share> = (0..50).map(|_| counted(&budget).0).collect();
        let mut had = Vec::new();
        for share in &mut shares {
            had.push((0..200).filter(|_| share.take(MIB, true)).count());
        }
        assert!(budget.used_bytes() <= 192 * MIB, "{}", budget.used_bytes());
        // Each gets about half of what is free.
        assert_eq!(had[..3], [96, 48, 25], "{had:?}");
        // Shares without memory beyond their own wait for the others.
        assert!(shares[0].is_wanted(true) && !shares[0].is_wanted(false) && !shares[49].is_wanted(true));
        shares.iter_mut().for_each(Share::withdraw);
        assert!(!shares[0].is_wanted(true));
        // Reads continue, both of shares with much memory and of others.
        let (mut reader, _) = counted(&budget);
        for share in [&mut reader, &mut shares[0]] {
            assert!(share.take(16 * MIB, false));
            share.give(16 * MIB, false);
        }
        drop((shares, reader));
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn writes_finish_while_others_read_without_pause() {
        let budget = Budget::new(128 * MIB);
        let mut readers: Vec<Share> = (0..50).map(|_| counted(&budget).0).collect();
        let (mut writer, woken) = counted(&budget);
        readers.iter_mut().for_each(|share| while share.take(MIB, false) {});
        assert!(budget.used_bytes() > 90 * MIB && writer.take(32 * MIB, true));
        let (mut second, _) = counted(&budget);
        assert!(!second.take(32 * MIB, true));
        // Readers take again what they release.
        for share in &mut readers {
            share.give(MIB, false);
            share.take(MIB, false);
        }
        writer.give(32 * MIB, true);
        assert!(second.take(32 * MIB, true));
        assert_eq!(woken.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_request_of_more_than_there_is_goes_alone() {
        let budget = Budget::new(64 * MIB);
        let (mut long, _) = counted(&budget);
        assert!(long.take(u64::from(u32::MAX), false) && !long.take(1, false));
        let (mut next, woken) = counted(&budget);
        assert!(!next.take(MIB, false));
        long.give(u64::from(u32::MAX), false);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(next.take(MIB, false));
    }

    #[test]
    fn waiters_are_served_in_order_and_woken() {
        let budget = Budget::new(64 * MIB);
        let (mut greedy, _) = counted(&budget);
        assert!(greedy.take(44 * MIB, false));
        let (mut long, long_woken) = counted(&budget);
        let (mut short, short_woken) = counted(&budget);
        assert!(!long.take(32 * MIB, false) && long.is_waiting());
        // It would fit, and still does not pass the one before it; nor does whoever has something already.
        assert!(!short.take(2 * MIB, false) && !greedy.take(1, false));
        assert!(greedy.is_wanted(false) && !greedy.is_wanted(true), "it stores nothing");
        // What cannot wait does.
        assert!(short.take_unasked(MIB, false) && !short.take_unasked(8 * MIB, false));
        short.give(MIB, false);
        greedy.give(10 * MIB, false);
        assert_eq!(long_woken.load(Ordering::SeqCst), 0);
        greedy.give(30 * MIB, false);
        assert_eq!((long_woken.load(Ordering::SeqCst), short_woken.load(Ordering::SeqCst)), (1, 1));
        assert!(long.take(32 * MIB, false) && short.take(2 * MIB, false));
        assert!(!long.is_waiting());
        drop((greedy, long));
        short.give(2 * MIB, false);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn a_waiter_behind_a_withdrawn_one_is_served() {
        let budget = Budget::new(64 * MIB);
        let (mut greedy, _) = counted(&budget);
        assert!(greedy.take(44 * MIB, false));
        let ends: [fn(Share) -> Option<Share>; 2] = [
            |gone| {
                drop(gone);
                None
            },
            |mut withdrawn| {
                withdrawn.withdraw();
                Some(withdrawn)
            },
        ];
        for end in ends {
            let (mut long, _) = counted(&budget);
            let (mut short, woken) = counted(&budget);
            assert!(!long.take(32 * MIB, false) && !short.take(2 * MIB, false));
            let _long = end(long);
            assert_eq!(woken.load(Ordering::SeqCst), 1);
            assert!(short.take(2 * MIB, false));
        }
    }

    #[test]
    fn unwanted_grants_go_to_the_next_waiter() {
        let budget = Budget::new(64 * MIB);
        let (mut greedy, _) = counted(&budget);
        assert!(greedy.take(48 * MIB, false));
        let (mut gone, _) = counted(&budget);
        let (mut aborted, _) = counted(&budget);
        let (mut next, woken) = counted(&budget);
        for share in [&mut gone, &mut aborted, &mut next] {
            assert!(!share.take(32 * MIB, false));
        }
        drop(gone);
        let (mut withdrawn, _) = counted(&budget);
        assert!(!withdrawn.take(32 * MIB, false));
        withdrawn.withdraw();
        assert!(!withdrawn.is_waiting());
        greedy.give(48 * MIB, false);
        assert_eq!(woken.load(Ordering::SeqCst), 0);
        assert!(aborted.is_granted());
        aborted.settle();
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(next.take(32 * MIB, false));
        next.give(32 * MIB, false);
        assert_eq!(budget.used_bytes(), 0);
    }

    /// Whatever the order of events, all come to an end, and never is more taken than there is.
    #[test]
    fn no_waiter_starves() {
        let budget = Budget::new(64 * MIB);
        let threads: Vec<_> = (0..6_u64)
            .map(|number| {
                let budget = Arc::clone(&budget);
                std::thread::spawn(move || {
                    let this = std::thread::current();
                    let mut share = budget.share(move || this.unpark());
                    let (stores, mut held) = (number % 2 == 0, VecDeque::new());
                    for round in 0..3_000_u64 {
                        let bytes = (round * 7 + number * 13) % 31 * MIB + 4096;
                        while !share.take(bytes, stores) {
                            match held.pop_front() {
                                Some(bytes) => share.give(bytes, stores),
                                None => std::thread::park(),
                            }
                        }
                        held.push_back(bytes);
                        assert!(budget.used_bytes() <= 64 * MIB);
                        if round % 3 == 0 {
                            held.drain(..).for_each(|bytes| share.give(bytes, stores));
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(budget.used_bytes(), 0);
    }
}
