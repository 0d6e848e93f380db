//! Removals of whole images during a promotion.

use std::sync::Arc;

use headwater_store::{Access, Channel, Pointer, StoreErrorKind};

use super::{Place, name, publish, writable};

/// Either the image is removed, or its version is promoted and the removal is refused: never both.
pub fn a_promotion_during_a_removal_of_the_image_is_not_lost(place: &dyn Place) {
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
