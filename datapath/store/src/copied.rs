//! The record of what one copy did to an image: new versions, moved channels, changed notes. A copy notes
//! its own changes one by one; changes that others make in between do not belong to the record. The daemon
//! writes its history from it.

use crate::error::StoreError;
use crate::name::ImageName;
use crate::refs::{Channel, Image, Pointer};
use crate::store::Adopted;

/// A channel that was moved to another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelMove {
    /// The channel; never `maintenance`, which cannot be set.
    pub channel: Channel,
    /// The version that it pointed to. `None`: it was not set.
    pub from: Option<u32>,
    /// The version that it points to now. `None`: it is no longer set.
    pub to: Option<u32>,
}

/// What a copy did to an image of the target.
#[derive(Clone, Debug)]
pub struct CopiedImage {
    /// Its name.
    pub name: ImageName,
    /// The numbers of the versions that are new in it, ascending.
    pub versions: Vec<u32>,
    /// Whether one of these was the newest version when it was added.
    pub has_newest: bool,
    /// Whether channels, scheduled promotions, notes or retired versions were changed to match the source.
    pub is_followed: bool,
    /// Its channels that were moved. A channel that somebody else moved in between can be listed twice.
    pub moves: Vec<ChannelMove>,
    /// Scheduled promotions that were cancelled.
    pub forgotten: Vec<Pointer>,
    /// Scheduled promotions that are new.
    pub scheduled: Vec<Pointer>,
    /// Versions whose note changed.
    pub noted: Vec<u32>,
    /// Versions that were retired.
    pub retired: Vec<u32>,
    /// Versions that are no longer retired.
    pub unretired: Vec<u32>,
    /// The version that a machine booted before if it named only the image; `None` if there was none. Equal
    /// to `boots` if the copy did not change it.
    pub booted: Option<u32>,
    /// The version that such a machine boots now.
    pub boots: Option<u32>,
    /// The error of a change whose outcome is unknown. The copy ended with this error.
    pub tried: Option<StoreError>,
}

impl CopiedImage {
    /// A record without any change.
    pub(crate) fn nothing(name: &ImageName) -> Self {
        Self {
            name: name.clone(),
            versions: Vec::new(),
            has_newest: false,
            is_followed: false,
            moves: Vec::new(),
            forgotten: Vec::new(),
            scheduled: Vec::new(),
            noted: Vec::new(),
            retired: Vec::new(),
            unretired: Vec::new(),
            booted: None,
            boots: None,
            tried: None,
        }
    }

    /// Whether the copy changed anything.
    pub(crate) fn is_something(&self) -> bool {
        !self.versions.is_empty() || self.is_followed || self.tried.is_some()
    }

    /// Records that a version was adopted.
    pub(crate) fn adopted(&mut self, number: u32, adopted: Adopted) {
        self.versions.push(number);
        self.has_newest |= adopted.is_newest;
        self.now_boots(adopted.booted, adopted.boots);
    }

    /// Records one change, which made the image `after` from `before`.
    pub(crate) fn changed(&mut self, mut before: Image, after: &Image) {
        self.now_boots(before.booted(), after.booted());
        // The next version number is not visible to users.
        before.next_number = after.next_number;
        if before == *after {
            return;
        }
        self.is_followed = true;
        for channel in Channel::ALL {
            let version = |image: &Image| image.channel(channel).map(|pointer| pointer.version);
            self.moved(ChannelMove { channel, from: version(&before), to: version(after) });
        }
        for pointer in before.scheduled().iter().filter(|it| !after.scheduled().contains(it)) {
            note(pointer, &mut self.forgotten, &mut self.scheduled);
        }
        for pointer in after.scheduled().iter().filter(|it| !before.scheduled().contains(it)) {
            note(pointer, &mut self.scheduled, &mut self.forgotten);
        }
        for version in &after.versions {
            let number = version.number;
            let place = before.versions.binary_search_by_key(&number, |was| was.number);
            let Some(was) = place.ok().and_then(|at| before.versions.get(at)) else { continue };
            if was.note != version.note {
                self.noted.push(number);
            }
            match (was.retired, version.retired) {
                (false, true) => self.retired.push(number),
                (true, false) => self.unretired.push(number),
                (false, false) | (true, true) => {}
            }
        }
    }

    fn moved(&mut self, step: ChannelMove) {
        if step.from == step.to {
            return;
        }
        let last = self.moves.iter_mut().rev().find(|known| known.channel == step.channel);
        match last {
            Some(known) if known.to == step.from => known.to = step.to,
            // This is the first step, or somebody else moved the channel in between.
            _ => self.moves.push(step),
        }
        self.moves.retain(|known| known.from != known.to);
    }

    /// Records which version machines booted before a change of this copy, and which they boot after it.
    fn now_boots(&mut self, before: Option<u32>, after: Option<u32>) {
        let is_as_it_was = self.booted == self.boots;
        if is_as_it_was {
            self.booted = before;
        }
        if is_as_it_was || before != after {
            self.boots = after;
        }
    }
}

/// Adds a scheduled promotion to `these`. If `others` has it, it is removed there instead, because the two
/// cancel each other out.
fn note(pointer: &Pointer, these: &mut Vec<Pointer>, others: &mut Vec<Pointer>) {
    match others.iter().position(|other| other == pointer) {
        Some(at) => {
            others.remove(at);
        }
        None => these.push(pointer.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Hash;
    use crate::refs::Version;

    /// An image with this many versions.
    fn image(versions: u32) -> Image {
        let mut image = Image::empty("deb".parse().unwrap());
        for number in 1..=versions {
            let version = Version {
                number,
                manifest: Hash::of(&number.to_le_bytes()),
                created_at_s: 0,
                size_bytes: 512,
                stored_bytes: 0,
                source: String::new(),
                note: String::new(),
                author: String::new(),
                retired: false,
                keeps_identity: false,
                objects: Vec::new(),
            };
            image.adopt(&version).unwrap();
        }
        image
    }

    fn to(channel: Channel, version: u32, at_s: u64) -> Pointer {
        Pointer { channel, version, at_s, author: "anna".into() }
    }

    /// Changes an image and records the change.
    fn step(did: &mut CopiedImage, image: &mut Image, change: impl FnOnce(&mut Image)) {
        let before = image.clone();
        change(image);
        did.changed(before, image);
    }

    #[test]
    fn own_changes_are_merged_and_foreign_changes_left_out() {
        use Channel::{Production, Test};
        let mut image = image(4);
        let mut did = CopiedImage::nothing(&image.name);
        step(&mut did, &mut image, |image| drop(image.promote(to(Production, 1, 5)).unwrap()));
        step(&mut did, &mut image, |image| drop(image.promote(to(Production, 2, 6)).unwrap()));
        let moved = |channel, from, to| ChannelMove { channel, from, to };
        assert_eq!(did.moves, [moved(Production, None, Some(2))]);
        assert_eq!((did.booted, did.boots), (Some(4), Some(2)));
        // A change by somebody else.
        image.promote(to(Production, 3, 7)).unwrap();
        image.promote(to(Test, 3, 7)).unwrap();
        step(&mut did, &mut image, |image| {
            image.set_note(1, "kept").unwrap();
            image.retire(4, true).unwrap();
        });
        assert_eq!(did.moves, [moved(Production, None, Some(2))]);
        assert_eq!((did.booted, did.boots), (Some(4), Some(2)));
        assert_eq!((&did.noted[..], &did.retired[..], &did.unretired[..]), (&[1][..], &[4][..], &[][..]));
        step(&mut did, &mut image, |image| {
            image.promote(to(Production, 1, 8)).unwrap();
            image.revert(Test).unwrap();
        });
        assert_eq!(
            did.moves,
            [
                moved(Production, None, Some(2)),
                moved(Test, Some(3), None),
                moved(Production, Some(3), Some(1))
            ]
        );
        assert_eq!((did.booted, did.boots), (Some(4), Some(1)));
    }

    #[test]
    fn a_channel_and_a_promotion_that_are_taken_back_are_nothing() {
        use Channel::{Production, Test};
        let mut image = image(2);
        let planned = to(Production, 2, 90);
        image.schedule(planned.clone()).unwrap();
        image.schedule(to(Test, 1, 80)).unwrap();
        let mut did = CopiedImage::nothing(&image.name);
        step(&mut did, &mut image, |image| drop(image.promote(to(Production, 1, 5)).unwrap()));
        assert_eq!((&did.forgotten[..], did.boots), (&[planned.clone()][..], Some(1)));
        step(&mut did, &mut image, |image| {
            image.revert(Production).unwrap();
            image.schedule(planned.clone()).unwrap();
            image.schedule(to(Test, 2, 80)).unwrap();
        });
        assert_eq!((did.moves.len(), did.booted, did.boots), (0, Some(2), Some(2)));
        assert_eq!((did.forgotten, did.scheduled), (vec![to(Test, 1, 80)], vec![to(Test, 2, 80)]));
    }

    #[test]
    fn an_unchanged_image_is_not_reported() {
        let mut image = image(2);
        let mut did = CopiedImage::nothing(&image.name);
        step(&mut did, &mut image, |image| image.next_number = 9);
        assert!(!did.is_something() && did.booted == Some(2) && did.boots == Some(2));
        did.adopted(3, Adopted { is_newest: true, booted: Some(2), boots: Some(3) });
        assert!(did.is_something() && did.has_newest);
        assert_eq!((&did.versions[..], did.booted, did.boots), (&[3][..], Some(2), Some(3)));
    }
}
