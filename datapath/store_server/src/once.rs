//! Reads a content from the store once for all concurrent requests, because a manifest may have a GiB.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use headwater_store::StoreError;
use parking_lot::Mutex;

use crate::answer::Target;

type Outcome<T> = Arc<OnceLock<Result<T, StoreError>>>;

/// The contents that are being read.
pub(crate) struct Once<T> {
    reading: Mutex<HashMap<Target, Outcome<T>>>,
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        Self { reading: Mutex::default() }
    }
}

impl<T: Clone> Once<T> {
    /// Returns the result of `read`, or of a read of the same content that another request began and has not
    /// finished. An error is shared in the same way.
    pub(crate) fn read(
        &self,
        what: &Target,
        read: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let outcome = Arc::clone(self.reading.lock().entry(what.clone()).or_default());
        let read = || {
            let outcome = read();
            // Later requests find the content in the cache.
            self.reading.lock().remove(what);
            outcome
        };
        outcome.get_or_init(read).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use headwater_store::{Hash, StoreErrorKind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn concurrent_requests_share_one_read() {
        let (once, what) = (Once::default(), Target::Manifest(Hash::of(b"m")));
        let reads = AtomicUsize::new(0);
        let (begun, wait_begun) = std::sync::mpsc::channel();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let read = |outcome: Result<Bytes, StoreError>| {
            reads.fetch_add(1, Ordering::SeqCst);
            outcome
        };
        let gone = || StoreError::new(StoreErrorKind::Unreachable, "gone");
        std::thread::scope(|scope| {
            let (once, what, read) = (&once, &what, &read);
            let first = scope.spawn(move || {
                once.read(what, || {
                    begun.send(()).unwrap();
                    wait.recv().unwrap();
                    read(Err(gone()))
                })
            });
            wait_begun.recv().unwrap();
            // Another content does not wait for it.
            let other = Target::Trace(Hash::of(b"m"));
            assert_eq!(once.read(&other, || read(Ok(Bytes::from_static(b"t")))).unwrap(), "t");
            let others: Vec<_> =
                (0..8).map(|_| scope.spawn(move || once.read(what, || read(Err(gone()))))).collect();
            let outcome = Arc::clone(&once.reading.lock()[what]);
            // Ten requests, the map, and this one.
            headwater_testkit::wait_until("all requests wait", || Arc::strong_count(&outcome) == 11);
            go_on.send(()).unwrap();
            for one in others.into_iter().chain([first]) {
                assert_eq!(one.join().unwrap().unwrap_err().kind(), StoreErrorKind::Unreachable);
            }
        });
        assert_eq!(reads.load(Ordering::SeqCst), 2);
        // Errors are not kept.
        assert_eq!(once.read(&what, || read(Ok(Bytes::from_static(b"m")))).unwrap(), "m");
        assert!(once.reading.lock().is_empty());
    }

    #[test]
    fn a_read_that_panics_blocks_no_other_request() {
        let (once, what) = (Once::default(), Target::Images);
        let panics = || once.read(&what, || panic!("a bug")).map(drop);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(once.read(&what, || Ok(Bytes::from_static(b"m"))).unwrap(), "m");
        assert!(once.reading.lock().is_empty());
    }
}
