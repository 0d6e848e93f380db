//! Whole images that are removed while somebody promotes.

use std::sync::Arc;

use headwater_store::{Access, Channel, Pointer, StoreErrorKind};

use super::{Place, name, publish, writable};

/// An image on its way out is not promoted, and one that is promoted does not go unasked: one of both happens.
pub fn a_promotion_and_a_removal_of_its_image_at_once_lose_no_promotion(place: &dyn Place) {
    let first = writable(place);
    let second = place.open(Access::WRITE).unwrap_or_else(|_| Arc::clone(&first));
    for round in 0..8u8 {
        let version = publish(first.as_ref(), "a", &[round; 9], &[], &[round; 5]).unwrap();
        let pointer =
            Pointer { channel: Channel::Test, version: version.number, at_s: 1, author: String::new() };
        let (promoted, removed) = std::thread::scope(|scope| {
            let promote = scope
                .spawn(|| second.change(&name("a"), &mut |image| image.promote(pointer.clone()).map(drop)));
            let removed = first.remove_unless_promoted(&name("a"));
            (promote.join().unwrap(), removed)
        });
        let image = first.image(&name("a")).unwrap();
        match (promoted, removed) {
            (Ok(()), Err(e)) => {
                assert_eq!(e.kind(), StoreErrorKind::InUse, "{e}");
                assert_eq!(image.unwrap().channel(Channel::Test), Some(&pointer));
                first.remove(&name("a"), None).unwrap();
            }
            (Err(e), Ok(_)) => {
                assert_eq!(e.kind(), StoreErrorKind::NotFound, "{e}");
                assert_eq!(image, None);
            }
            both => panic!("round {round}: {both:?}"),
        }
    }
}
