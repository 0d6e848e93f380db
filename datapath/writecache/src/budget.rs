//! One RAM budget for all caches of a host: its limit, what is in use, and each cache's share of it.
//!
//! While every cache gets the memory that it asks for, no cache has a share and nothing is computed. When
//! memory reaches the host's limit, the host's thread divides the limit:
//!
//! | state of a cache | its demand | its share |
//! |---|---|---|
//! | was refused memory in the last second | its own maximum | by weight, up to its demand |
//! | was not refused memory | the memory that it uses | by weight, up to its demand |
//! | served nothing from RAM for [`IDLE`] | four segments | four segments |
//!
//! No share is below a cache's index and four segments (or the memory that it uses, if that is less). Memory
//! that some caches do not demand goes to the others, again by weight. A cache above its share packs, spills
//! and evicts segments until it is within the share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::host::STAGING_BUFFERS;
use crate::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;

/// Default weight of a cache.
pub const DEFAULT_WEIGHT: u32 = 100;

/// The largest weight; the least is 1.
pub const MAX_WEIGHT: u32 = 10_000;

/// A cache that served nothing from RAM for this time gives its share to others.
pub const IDLE: Duration = Duration::from_secs(3);

/// A cache demands more memory for this time after it was refused memory.
const ASKS_FOR: Duration = Duration::from_secs(1);

/// Shares are computed at most this often.
const SHARE_INTERVAL: Duration = Duration::from_millis(100);

/// The bytes of all staging buffers of a host.
const STAGING_BYTES: u64 = (STAGING_BUFFERS * ENCRYPTED_SEGMENT_BYTES) as u64;

/// The bound of a cache without one.
const UNBOUNDED: u64 = u64::MAX;

/// The budget of a host.
#[derive(Debug)]
pub struct Budget {
    /// The limit as configured.
    configured_bytes: AtomicU64,
    /// The bound that memory pressure set; [`UNBOUNDED`] without.
    pressure_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// Whether a cache was refused memory, or the limit was changed.
    short: AtomicBool,
    /// The number of caches with an overflow disk: they share the staging buffers.
    spilling: AtomicU32,
}

impl Budget {
    /// Makes a budget of this many bytes.
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            configured_bytes: AtomicU64::new(limit_bytes),
            pressure_bytes: AtomicU64::new(UNBOUNDED),
            used_bytes: AtomicU64::new(0),
            short: AtomicBool::new(false),
            spilling: AtomicU32::new(0),
        }
    }

    /// The limit as configured.
    pub fn configured_bytes(&self) -> u64 {
        self.configured_bytes.load(Ordering::Relaxed)
    }

    /// The limit now: as configured, or less under memory pressure.
    pub fn limit_bytes(&self) -> u64 {
        self.configured_bytes().min(self.pressure_bytes.load(Ordering::Relaxed))
    }

    /// RAM in use.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Whether [`Budget::take`] would grant this many bytes.
    pub fn has(&self, bytes: u64) -> bool {
        self.used_bytes().saturating_add(bytes) <= self.limit_bytes()
    }

    /// Changes the configured limit. The caller wakes the host's thread.
    pub fn set_configured_bytes(&self, limit_bytes: u64) {
        self.configured_bytes.store(limit_bytes, Ordering::Relaxed);
        self.short.store(true, Ordering::Release);
    }

    /// Sets the bound of memory pressure; `None` removes it.
    pub fn set_pressure_bytes(&self, bound: Option<u64>) {
        self.pressure_bytes.store(bound.unwrap_or(UNBOUNDED), Ordering::Relaxed);
        self.short.store(true, Ordering::Release);
    }

    /// Counts `bytes` as used if they fit. Returns whether they did.
    pub fn take(&self, bytes: u64) -> bool {
        let limit = self.limit_bytes();
        self.used_bytes
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|total| *total <= limit)
            })
            .is_ok()
    }

    /// Counts `bytes` as used, even above the limit.
    pub fn add(&self, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Counts `bytes` as free again.
    pub fn give(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Notes that a cache was refused memory. Returns whether the host's thread does not know yet.
    pub fn refused(&self) -> bool {
        !self.short.swap(true, Ordering::AcqRel)
    }

    fn is_short(&self) -> bool {
        self.short.load(Ordering::Acquire)
    }

    /// Counts a further cache with an overflow disk.
    pub fn join_spilling(&self) {
        self.spilling.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one cache with an overflow disk less.
    pub fn leave_spilling(&self) {
        self.spilling.fetch_sub(1, Ordering::AcqRel);
    }

    /// The part of the host's staging buffers that counts for each cache with an overflow disk, in bytes.
    pub fn staging_part_bytes(&self) -> u64 {
        STAGING_BYTES / u64::from(self.spilling.load(Ordering::Relaxed).max(1))
    }
}

/// The budget of one cache.
#[derive(Debug)]
pub struct Share {
    weight: AtomicU32,
    /// [`UNBOUNDED`] while the host's limit is not short.
    bytes: AtomicU64,
    /// Whether memory was refused since shares were computed last.
    asked: AtomicBool,
    /// State that only the host's thread uses.
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    hits: u64,
    active: Option<Instant>,
    asked: Option<Instant>,
}

impl Share {
    /// The share of a new cache: without a bound.
    pub fn new(weight: u32) -> Self {
        Self {
            weight: AtomicU32::new(weight.clamp(1, MAX_WEIGHT)),
            bytes: AtomicU64::new(UNBOUNDED),
            asked: AtomicBool::new(false),
            seen: Mutex::default(),
        }
    }

    /// The bound in bytes; `u64::MAX` if there is none.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The weight.
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Changes the weight.
    pub fn set_weight(&self, weight: u32) {
        self.weight.store(weight.clamp(1, MAX_WEIGHT), Ordering::Relaxed);
    }

    /// Notes that memory was refused.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Release);
    }

    /// The claim of the cache now.
    fn claim(&self, now: Instant, holding: &Holding) -> Claim {
        let mut seen = self.seen.lock();
        if self.asked.swap(false, Ordering::AcqRel) {
            seen.asked = Some(now);
        }
        if seen.hits != holding.hits || seen.active.is_none() {
            seen.hits = holding.hits;
            seen.active = Some(now);
        }
        let since = |then: Option<Instant>| then.map(|then| now.saturating_duration_since(then));
        let most = holding.max_bytes.max(holding.least_bytes);
        let (may_grow_to, demand) = if since(seen.asked).is_some_and(|age| age < ASKS_FOR) {
            (0, most)
        } else if since(seen.active).is_some_and(|age| age < IDLE) {
            (most, holding.used_bytes.min(most))
        } else {
            (0, holding.used_bytes.min(holding.least_bytes))
        };
        Claim { weight: self.weight(), least: holding.least_bytes.min(demand), demand, may_grow_to }
    }
}

/// The memory of a cache, as far as it matters for shares.
#[derive(Clone, Copy, Debug)]
pub struct Holding {
    /// Its own maximum.
    pub max_bytes: u64,
    /// Index, its part of the staging buffers, and the four segments that it always may have.
    pub least_bytes: u64,
    /// Bytes in use, including its part of the staging buffers.
    pub used_bytes: u64,
    /// Blocks served from or stored to RAM so far.
    pub hits: u64,
}

/// Computes the shares, on the host's thread.
#[derive(Debug, Default)]
pub struct Divider {
    last: Option<Instant>,
}

impl Divider {
    /// Computes the shares, if that is due. Otherwise returns when it is due, if it will be.
    pub fn divide_if_due(
        &mut self,
        budget: &Budget,
        now: Instant,
        caches: &[(&Share, Holding)],
    ) -> Option<Instant> {
        let due = self.last.and_then(|last| last.checked_add(SHARE_INTERVAL)).filter(|due| *due > now);
        if due.is_some() {
            return due;
        }
        self.last = Some(now);
        budget.short.store(false, Ordering::Release);
        let claims: Vec<Claim> = caches.iter().map(|(share, holding)| share.claim(now, holding)).collect();
        let shares = divide(budget.limit_bytes(), &claims);
        for ((share, _), bytes) in caches.iter().zip(shares) {
            share.bytes.store(bytes, Ordering::Relaxed);
        }
        None
    }

    /// Whether [`Divider::divide_if_due`] has work to do.
    pub fn is_due(&self, budget: &Budget) -> bool {
        budget.is_short()
    }
}

/// The claim of one cache on a limit.
#[derive(Clone, Copy, Debug)]
struct Claim {
    weight: u32,
    least: u64,
    demand: u64,
    /// A cache that demands no more memory may still grow to this many bytes, by weight, without a refusal.
    may_grow_to: u64,
}

impl Claim {
    /// The share of the claim if each unit of weight gets `level` bytes.
    fn at(&self, level: u64) -> u64 {
        level.saturating_mul(u64::from(self.weight)).clamp(self.least, self.demand.max(self.least))
    }
}

/// Divides `limit` by weight: each claim gets `level x weight` bytes, but at least its minimum and at most
/// its demand, with the highest level at which the sum fits.
fn divide(limit: u64, claims: &[Claim]) -> Vec<u64> {
    let total = |level: u64| claims.iter().fold(0u64, |sum, claim| sum.saturating_add(claim.at(level)));
    if total(UNBOUNDED) <= limit {
        return vec![UNBOUNDED; claims.len()];
    }
    let (mut fits, mut too_much) = (0, limit);
    while too_much - fits > 1 {
        let middle = fits + (too_much - fits) / 2;
        if total(middle) <= limit {
            fits = middle;
        } else {
            too_much = middle;
        }
    }
    let growth = |claim: &Claim| fits.saturating_mul(u64::from(claim.weight)).min(claim.may_grow_to);
    claims.iter().map(|claim| claim.at(fits).max(growth(claim))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn claim(weight: u32, least_mib: u64, demand_mib: u64) -> Claim {
        Claim { weight, least: least_mib * MIB, demand: demand_mib * MIB, may_grow_to: 0 }
    }

    fn mib(limit_mib: u64, claims: &[Claim]) -> Vec<u64> {
        divide(limit_mib * MIB, claims).into_iter().map(|bytes| bytes.div_ceil(MIB)).collect()
    }

    #[test]
    fn a_limit_is_divided_by_weight() {
        assert_eq!(mib(400, &[claim(100, 10, 1000), claim(300, 10, 1000)]), [100, 300]);
        assert_eq!(mib(100, &[claim(1, 1, 1000), claim(1, 1, 1000)]), [50, 50]);
    }

    #[test]
    fn what_one_does_not_ask_for_goes_to_the_others_by_weight() {
        let claims = [claim(100, 10, 40), claim(100, 10, 1000), claim(200, 10, 1000)];
        assert_eq!(mib(340, &claims), [40, 100, 200]);
    }

    #[test]
    fn nobody_gets_less_than_its_least() {
        assert_eq!(mib(100, &[claim(1, 20, 500), claim(99, 10, 500)]), [20, 80]);
        assert_eq!(mib(10, &[claim(100, 20, 500), claim(100, 20, 500)]), [20, 20]);
    }

    #[test]
    fn where_all_fit_nobody_is_bound() {
        assert_eq!(divide(100 * MIB, &[claim(1, 1, 50), claim(1, 1, 50)]), [UNBOUNDED; 2]);
        assert!(divide(UNBOUNDED, &[claim(1, 1, 50)])[0] == UNBOUNDED);
        assert!(divide(5, &[]).is_empty());
    }

    #[test]
    fn a_cache_that_was_quiet_lends_all_but_its_least() {
        let budget = Budget::new(100 * MIB);
        let (busy, quiet) = (Share::new(100), Share::new(100));
        let holding = |used_mib: u64, hits| Holding {
            max_bytes: 100 * MIB,
            least_bytes: 10 * MIB,
            used_bytes: used_mib * MIB,
            hits,
        };
        let start = Instant::now();
        let mut divider = Divider::default();
        let mut turn = |after_s: u64, hits| {
            busy.ask();
            let now = start + Duration::from_secs(after_s);
            divider.divide_if_due(&budget, now, &[(&busy, holding(50, hits)), (&quiet, holding(50, 7))]);
            (busy.bytes().div_ceil(MIB), quiet.bytes().div_ceil(MIB))
        };
        assert_eq!(turn(0, 1), (50, 50));
        assert_eq!(turn(2, 2), (50, 50));
        assert_eq!(turn(4, 3), (90, 10));
    }
}
