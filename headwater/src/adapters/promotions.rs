//! Promotions of one store whose time has come.
//!
//! Other daemons may schedule promotions in the same store, and end before they carry them out. So it is looked at again every
//! [`LOOK_EVERY_S`] seconds at the latest, whatever this daemon knows; a store that can only be read is not looked at.

use std::sync::Arc;

use headwater_service::backend::{BackendError, Promoted, Promotion};
use headwater_store::{ImageName, Pointer, Store, StoreError};
use parking_lot::Mutex;

use crate::adapters::images::{promotion_of, store_failed};

/// The longest time between two looks. Each reads the lists of versions of all images.
pub const LOOK_EVERY_S: u64 = 60;

/// When to look at a store.
pub struct Promotions {
    store: Arc<dyn Store>,
    /// In seconds since 1970. Until then nobody looks.
    next_look_s: Mutex<u64>,
}

impl Promotions {
    /// Those of `store`, which is looked at soon.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, next_look_s: Mutex::new(0) }
    }

    /// One was scheduled for this time.
    pub fn expect(&self, at_s: u64) {
        let mut next_look_s = self.next_look_s.lock();
        *next_look_s = at_s.min(*next_look_s);
    }

    /// Whether it is time to look. Also where the next look is further away than any is planned: then the clock was set back,
    /// and what it says now counts.
    pub fn is_time(&self, now_s: u64) -> bool {
        let next_look_s = *self.next_look_s.lock();
        let is_planned = now_s < next_look_s && next_look_s <= now_s.saturating_add(LOOK_EVERY_S);
        !self.store.is_read_only() && !is_planned
    }

    /// Looks at the store, and carries out what is due.
    pub fn carry_out(&self, now_s: u64) -> Result<Promoted, BackendError> {
        // Before looking, so that what is scheduled meanwhile is not overlooked. A store that cannot be read or written
        // is not asked each second either.
        *self.next_look_s.lock() = now_s.saturating_add(LOOK_EVERY_S);
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
        // By another daemon, which is gone before its time.
        schedule(1010);
        assert!((1001..1060).all(|now_s| !promotions.is_time(now_s)), "each look costs");
        assert_eq!(versions(1000 + LOOK_EVERY_S), [1]);
        assert!(versions(1061).is_empty());
        // One that is known is carried out in time.
        schedule(1070);
        promotions.expect(1070);
        assert!(versions(1069).is_empty());
        assert_eq!(versions(1070), [1]);
        // The clock was an hour ahead, and is set back.
        assert!(versions(1080 + 3600).is_empty());
        schedule(1085);
        assert!(versions(1080).is_empty());
        assert_eq!(versions(1080 + LOOK_EVERY_S), [1]);
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
