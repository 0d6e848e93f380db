//! Scheduled promotions of a store: decides when to check for due promotions, and makes them. Used by [`super::images`], which the
//! service asks at each tick.
//!
//! Another daemon may schedule promotions in the same store, and end before it makes them. So the store is checked at least every
//! [`CHECK_INTERVAL_S`] seconds, whatever this daemon knows. A read-only store is not checked.

use std::sync::Arc;

use headwater_service::backend::{BackendError, Promoted, Promotion};
use headwater_store::{ImageName, Pointer, Store, StoreError};
use parking_lot::Mutex;

use crate::adapters::images::{promotion_of, store_failed};

/// The longest time between two checks. Each reads the version lists of all images.
pub const CHECK_INTERVAL_S: u64 = 60;

/// Decides when to check a store.
pub struct Promotions {
    store: Arc<dyn Store>,
    /// The time of the next check, in seconds since 1970.
    next_check_s: Mutex<u64>,
}

impl Promotions {
    /// The promotions of `store`, which is checked soon.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, next_check_s: Mutex::new(0) }
    }

    /// A promotion was scheduled for this time.
    pub fn expect(&self, at_s: u64) {
        let mut next_check_s = self.next_check_s.lock();
        *next_check_s = at_s.min(*next_check_s);
    }

    /// Whether to check now. Also true if the next check is further away than any is planned, which means that the clock
    /// was set back.
    pub fn is_time(&self, now_s: u64) -> bool {
        let next_check_s = *self.next_check_s.lock();
        let is_planned = now_s < next_check_s && next_check_s <= now_s.saturating_add(CHECK_INTERVAL_S);
        !self.store.is_read_only() && !is_planned
    }

    /// Checks the store, and makes the promotions that are due.
    pub fn carry_out(&self, now_s: u64) -> Result<Promoted, BackendError> {
        // Set before the check, so that a promotion that is scheduled meanwhile is not missed, and a store that fails
        // is not asked every second.
        *self.next_check_s.lock() = now_s.saturating_add(CHECK_INTERVAL_S);
        let listed = self.store.listed().map_err(store_failed)?;
        let mut promoted = Promoted::default();
        let unreadable = listed.unreadable.into_iter();
        promoted.failed.extend(unreadable.map(|(name, e)| (name.to_string(), store_failed(e))));
        for image in listed.images {
            if image.scheduled().iter().any(|pointer| pointer.at_s <= now_s) {
                match self.promote(&image.name, now_s) {
                    Ok(done) => promoted.done.extend(done),
                    Err(e) => promoted.failed.push((image.name.to_string(), store_failed(e))),
                }
            }
            let later = image.scheduled().iter().map(|pointer| pointer.at_s).filter(|at_s| *at_s > now_s);
            if let Some(next_s) = later.min() {
                self.expect(next_s);
            }
        }
        Ok(promoted)
    }

    fn promote(&self, name: &ImageName, now_s: u64) -> Result<Vec<(Promotion, Option<u64>)>, StoreError> {
        let mut done = Vec::new();
        self.store.change(name, &mut |image| {
            done = image.promote_due(now_s);
            Ok(())
        })?;
        let tell = |(pointer, before): (Pointer, Option<u32>)| {
            (promotion_of(name.as_str(), pointer), before.map(u64::from))
        };
        Ok(done.into_iter().map(tell).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_image::{ImportOptions, null_device};
    use headwater_store::{Access, Channel, LocalDir};

    #[test]
    fn what_somebody_else_scheduled_is_found_within_a_minute() {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalDir::open(dir.path(), Access::WRITE).unwrap());
        let name: ImageName = "disk".parse().unwrap();
        let options = ImportOptions::new(name.clone(), 500);
        headwater_image::import(null_device(1 << 20).unwrap(), &*store, &options, &mut |_| {}).unwrap();
        let schedule = |at_s| {
            let pointer = Pointer { channel: Channel::Test, version: 1, at_s, author: "b".into() };
            store.change(&name, &mut |image| image.schedule(pointer.clone()).map(drop)).unwrap();
        };
        let promotions = Promotions::new(Arc::clone(&store));
        let versions = |now_s| -> Vec<u64> {
            if !promotions.is_time(now_s) {
                return Vec::new();
            }
            promotions
                .carry_out(now_s)
                .unwrap()
                .done
                .into_iter()
                .map(|(promotion, _)| promotion.version)
                .collect()
        };
        assert!(versions(1000).is_empty());
        // Scheduled by another daemon, which ended before the time.
        schedule(1010);
        assert!((1001..1060).all(|now_s| !promotions.is_time(now_s)), "each look costs");
        assert_eq!(versions(1000 + CHECK_INTERVAL_S), [1]);
        assert!(versions(1061).is_empty());
        // A known promotion is made in time.
        schedule(1070);
        promotions.expect(1070);
        assert!(versions(1069).is_empty());
        assert_eq!(versions(1070), [1]);
        // The clock was an hour ahead, and is set back.
        assert!(versions(1080 + 3600).is_empty());
        schedule(1085);
        assert!(versions(1080).is_empty());
        assert_eq!(versions(1080 + CHECK_INTERVAL_S), [1]);
    }

    #[test]
    fn a_damaged_image_keeps_no_other_from_its_promotion() {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalDir::open(dir.path(), Access::WRITE).unwrap());
        for image in ["first", "second", "third"] {
            let name: ImageName = image.parse().unwrap();
            let options = ImportOptions::new(name.clone(), 500);
            headwater_image::import(null_device(1 << 20).unwrap(), &*store, &options, &mut |_| {}).unwrap();
            let pointer = Pointer { channel: Channel::Test, version: 1, at_s: 1010, author: "b".into() };
            store.change(&name, &mut |image| image.schedule(pointer.clone()).map(drop)).unwrap();
        }
        std::fs::write(dir.path().join("images/second"), b"nonsense").unwrap();
        let promoted = Promotions::new(Arc::clone(&store)).carry_out(1010).unwrap();
        let done: Vec<_> = promoted.done.iter().map(|(promotion, _)| promotion.image.as_str()).collect();
        assert_eq!(done, ["first", "third"]);
        let [(image, why)] = &promoted.failed[..] else { panic!("{:?}", promoted.failed) };
        assert!(image == "second" && why.to_string().contains("'second'"), "{why}");
    }
}
