//! Channels: which version each role boots, where its channel pointed before, and scheduled promotions.
//!
//! ```text
//!   maintenance   the newest version that is not retired; it cannot be set
//!   test          the version to which it was promoted
//!   production    the same; until the first promotion or seal, a machine that names only the image gets the newest
//!                 generalised version
//!
//!   promote  sets the channel's position, and cancels a scheduled promotion of the same channel
//!   schedule stores a promotion for later; `promote_due` performs it
//!   revert   returns the channel to its previous position; after a single promotion it is unset
//! ```
//! If a channel points to a version, or will by a scheduled promotion, the version can be neither retired nor
//! removed. Its image can be removed only together with its channels, if that is requested. A version to
//! which a channel pointed in the past can be removed. The channel then cannot return to it. If no earlier
//! version is left, the channel stays where it is: a revert unsets it only from the first position that it
//! ever had.

use std::collections::HashSet;

use crate::error::{StoreError, StoreErrorKind};
use crate::refs::Image;
use crate::store::NewVersion;

/// How many positions a channel remembers, including the present one. The oldest are dropped. Then one
/// position is used as the marker that older ones existed.
pub const CHANNEL_PAST_MAX: usize = 32;

/// A role of machines, such as production. The channel of a role points to the version that these machines boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// The newest version.
    Maintenance,
    /// Versions that are tested before all machines get them.
    Test,
    /// Versions that all machines get.
    Production,
}

impl Channel {
    /// All channels.
    pub const ALL: [Self; 3] = [Self::Maintenance, Self::Test, Self::Production];

    /// The name as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Maintenance => "maintenance",
            Self::Test => "test",
            Self::Production => "production",
        }
    }

    /// The number as it is stored.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Maintenance => 0,
            Self::Test => 1,
            Self::Production => 2,
        }
    }

    /// The reverse of [`Channel::code`], for channels that can be set.
    pub(crate) const fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Test),
            2 => Some(Self::Production),
            _ => None,
        }
    }
}

impl std::fmt::Display for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Channel {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        Self::ALL.into_iter().find(|channel| channel.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            StoreError::new(
                StoreErrorKind::Invalid,
                format!("'{}' is not a channel; there are {names}", text.escape_debug()),
            )
        })
    }
}

/// A present, past or scheduled position of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// The channel.
    pub channel: Channel,
    /// Number of the version.
    pub version: u32,
    /// Since when, or for a scheduled promotion from when on, in seconds since 1970.
    pub at_s: u64,
    /// Who requested it.
    pub author: String,
}

impl Image {
    /// The present position of a channel; `None` if it was never set. `maintenance` is never set.
    pub fn channel(&self, channel: Channel) -> Option<&Pointer> {
        self.pointers.iter().rev().find(|pointer| pointer.channel == channel)
    }

    /// The present and past positions of all channels, in the order in which they were set.
    pub fn pointers(&self) -> &[Pointer] {
        &self.pointers
    }

    /// The scheduled promotions.
    pub fn scheduled(&self) -> &[Pointer] {
        &self.scheduled
    }

    /// Points a channel to a version now. A scheduled promotion of the same channel is cancelled. Returns the
    /// earlier position, and the cancelled promotion.
    pub fn promote(&mut self, pointer: Pointer) -> Result<(Option<u32>, Option<Pointer>), StoreError> {
        self.check_target(&pointer)?;
        let forgets = self.forget_scheduled(pointer.channel);
        let before = self.channel(pointer.channel).map(|before| before.version);
        if before != Some(pointer.version) {
            self.push(pointer);
        }
        Ok((before, forgets))
    }

    /// Schedules a promotion. It replaces an earlier one of the same channel, which is returned.
    pub fn schedule(&mut self, pointer: Pointer) -> Result<Option<Pointer>, StoreError> {
        self.check_target(&pointer)?;
        let forgets = self.forget_scheduled(pointer.channel);
        self.scheduled.push(pointer);
        Ok(forgets)
    }

    /// Removes the scheduled promotion of a channel, if there is one.
    fn forget_scheduled(&mut self, channel: Channel) -> Option<Pointer> {
        self.scheduled.extract_if(.., |pointer| pointer.channel == channel).last()
    }

    /// Cancels the scheduled promotion of a channel.
    pub fn cancel(&mut self, channel: Channel) -> Result<Pointer, StoreError> {
        self.forget_scheduled(channel).ok_or_else(|| {
            StoreError::new(
                StoreErrorKind::NotFound,
                format!("image '{}' has no promotion to {channel} scheduled", self.name),
            )
        })
    }

    /// Performs the promotions that are due. Returns them with the earlier positions of their channels.
    pub fn promote_due(&mut self, now_s: u64) -> Vec<(Pointer, Option<u32>)> {
        let (mut due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.scheduled).into_iter().partition(|pointer| pointer.at_s <= now_s);
        self.scheduled = later;
        due.sort_by_key(|pointer| pointer.at_s);
        let mut done = Vec::new();
        for pointer in due {
            let before = self.channel(pointer.channel).map(|before| before.version);
            if before != Some(pointer.version) {
                self.push(pointer.clone());
            }
            done.push((pointer, before));
        }
        done
    }

    /// Returns a channel to its previous position. Before its first promotion it was not set. Returns the old
    /// and the new position.
    pub fn revert(&mut self, channel: Channel) -> Result<(u32, Option<u32>), StoreError> {
        if channel == Channel::Maintenance {
            return Err(self.maintenance_is_not_set());
        }
        let now = self.channel(channel).ok_or_else(|| self.channel_not_set(channel))?.version;
        let mut rest = self.pointers.clone();
        while let Some(at) = rest.iter().rposition(|pointer| pointer.channel == channel) {
            let can_go = rest
                .get(at)
                .is_some_and(|pointer| pointer.version != now && self.usable(pointer.version).is_some());
            if can_go {
                break;
            }
            rest.remove(at);
        }
        let before =
            rest.iter().rev().find(|pointer| pointer.channel == channel).map(|before| before.version);
        // Versions that were retired, removed or dropped from the history are skipped. If no other position
        // is left, the channel cannot return to the time before its first promotion.
        if before.is_none() && self.places_stored(channel) > 1 {
            return Err(StoreError::new(
                StoreErrorKind::Invalid,
                format!(
                    "channel {channel} of image '{}' cannot go back from version {now}: the versions that it pointed to before \
                     are retired, removed or forgotten: promote the version that you want",
                    self.name
                ),
            ));
        }
        self.pointers = rest;
        Ok((now, before))
    }

    /// Retires a version, or ends its retirement.
    pub fn retire(&mut self, number: u32, retired: bool) -> Result<(), StoreError> {
        self.select(&crate::name::Selector::Number(number))?;
        if let (true, Some(holder)) = (retired, self.held_by(number)) {
            return Err(StoreError::new(
                StoreErrorKind::InUse,
                format!("cannot retire {}@{number}: {holder}", self.name),
            ));
        }
        for version in self.versions.iter_mut().filter(|version| version.number == number) {
            version.retired = retired;
        }
        Ok(())
    }

    /// A sentence that names the channels that point to a version, or will.
    pub fn held_by(&self, number: u32) -> Option<String> {
        let names = |pointers: &mut dyn Iterator<Item = &Pointer>| {
            let of_version = pointers.filter(|pointer| pointer.version == number);
            of_version.map(|pointer| pointer.channel.name()).collect::<Vec<_>>()
        };
        let now = names(&mut Channel::ALL.into_iter().filter_map(|channel| self.channel(channel)));
        let later = names(&mut self.scheduled.iter());
        let now = match now.as_slice() {
            [] => None,
            [one] => Some(format!("{one} points to it; promote another version first")),
            all => Some(format!("{} point to it; promote another version of each first", all.join(" and "))),
        };
        let later = (!later.is_empty()).then(|| {
            let channels = later.join(" and ");
            format!(
                "it will be promoted to {channels}; cancel that first ('headwater image promote --cancel')"
            )
        });
        let all: Vec<String> = now.into_iter().chain(later).collect();
        (!all.is_empty()).then(|| all.join("; and "))
    }

    /// Fails if a channel points to a version that would be removed, or will. `number`: the version; `None`
    /// is the whole image.
    pub(crate) fn check_removal(&self, number: Option<u32>) -> Result<(), StoreError> {
        let name = &self.name;
        let message = match number {
            Some(number) => {
                self.select(&crate::name::Selector::Number(number))?;
                self.held_by(number).map(|holder| format!("cannot remove {name}@{number}: {holder}"))
            }
            None => self.promoted().map(|promoted| {
                format!(
                    "cannot remove image '{name}': {promoted}; 'headwater image remove {name} --force' removes it with \
                     its channels"
                )
            }),
        };
        message.map_or(Ok(()), |message| Err(StoreError::new(StoreErrorKind::InUse, message)))
    }

    /// A sentence with the positions of the channels that are set, and the scheduled promotions; `None` if
    /// there are neither.
    fn promoted(&self) -> Option<String> {
        let now = Channel::ALL.into_iter().filter_map(|channel| self.channel(channel));
        let now = now.map(|pointer| format!("{} points to version {}", pointer.channel, pointer.version));
        let later = self.scheduled.iter();
        let later = later
            .map(|pointer| format!("version {} will be promoted to {}", pointer.version, pointer.channel));
        let all: Vec<String> = now.chain(later).collect();
        (!all.is_empty()).then(|| all.join(", and "))
    }

    /// Removes a version from the list, and from the earlier positions of channels.
    pub(crate) fn forget(&mut self, number: u32) {
        self.versions.retain(|version| version.number != number);
        (self.pointers, self.cut_short) = self.places_where(|pointer| pointer.version != number);
        self.scheduled.retain(|pointer| pointer.version != number);
    }

    /// The positions that satisfy the condition, and the channels that had earlier positions than these.
    pub(super) fn places_where(
        &self,
        is_kept: impl Fn(&Pointer) -> bool,
    ) -> (Vec<Pointer>, HashSet<Channel>) {
        let is_cut_short = |channel: &Channel| {
            let mut places = self.pointers.iter().filter(|pointer| pointer.channel == *channel);
            let oldest = places.position(&is_kept);
            oldest.is_some_and(|at| at > 0 || self.cut_short.contains(channel))
        };
        let cut_short = Channel::ALL.into_iter().filter(is_cut_short).collect();
        (self.pointers.iter().filter(|pointer| is_kept(pointer)).cloned().collect(), cut_short)
    }

    /// How many positions of a channel are in the file.
    fn places_stored(&self, channel: Channel) -> usize {
        let places = self.pointers.iter().filter(|pointer| pointer.channel == channel).count();
        places.saturating_add(usize::from(self.cut_short.contains(&channel)))
    }

    pub(super) fn channel_not_set(&self, channel: Channel) -> StoreError {
        StoreError::new(
            StoreErrorKind::NotFound,
            format!(
                "channel {channel} of image '{0}' is not set; set it with 'headwater image promote {0}@NUMBER \
                 {channel}'",
                self.name
            ),
        )
    }

    fn maintenance_is_not_set(&self) -> StoreError {
        StoreError::new(
            StoreErrorKind::Invalid,
            format!(
                "channel maintenance of image '{}' is always its newest version, and cannot be set",
                self.name
            ),
        )
    }

    fn usable(&self, number: u32) -> Option<&super::Version> {
        self.versions.iter().find(|version| version.number == number && !version.retired)
    }

    fn check_target(&self, pointer: &Pointer) -> Result<(), StoreError> {
        if pointer.channel == Channel::Maintenance {
            return Err(self.maintenance_is_not_set());
        }
        let version = self.select(&crate::name::Selector::Number(pointer.version))?;
        if version.retired {
            return Err(StoreError::new(
                StoreErrorKind::Invalid,
                format!(
                    "cannot promote {0}@{1}: it is retired; bring it back first ('headwater image retire {0}@{1} \
                     --undo')",
                    self.name, pointer.version
                ),
            ));
        }
        Ok(())
    }

    /// If `production` is not set, sets it to the version that the image's name meant before this new
    /// version. Returns that version.
    pub(super) fn keep_production(&mut self, new: &NewVersion<'_>) -> Option<u32> {
        let channel = Channel::Production;
        if self.channel(channel).is_some() {
            return None;
        }
        let version = self.booted()?;
        // A scheduled promotion stays.
        self.push(Pointer { channel, version, at_s: new.created_at_s, author: new.author.to_owned() });
        Some(version)
    }

    fn push(&mut self, pointer: Pointer) {
        let channel = pointer.channel;
        self.pointers.push(pointer);
        if self.places_stored(channel) > CHANNEL_PAST_MAX {
            self.cut_short.insert(channel);
        }
        while self.places_stored(channel) > CHANNEL_PAST_MAX
            && let Some(oldest) = self.pointers.iter().position(|pointer| pointer.channel == channel)
        {
            self.pointers.remove(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Hash;
    use crate::name::Selector;
    use crate::refs::Version;

    fn image(versions: u32) -> Image {
        let mut image = Image::empty("deb".parse().unwrap());
        for number in 1..=versions {
            image.versions.push(Version {
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
            });
        }
        image.next_number = versions + 1;
        image
    }

    fn to(channel: Channel, version: u32, at_s: u64) -> Pointer {
        Pointer { channel, version, at_s, author: "anna".into() }
    }

    fn at(image: &Image, selector: &Selector) -> u32 {
        image.select(selector).unwrap().number
    }

    #[test]
    fn an_image_name_means_production_once_it_is_set() {
        use Channel::{Maintenance, Production, Test};
        let mut image = image(3);
        assert_eq!(at(&image, &Selector::Default), 3);
        let unset = image.select(&Selector::Channel(Test)).unwrap_err();
        assert_eq!(unset.kind(), StoreErrorKind::NotFound);
        assert_eq!(image.promote(to(Production, 1, 5)).unwrap(), (None, None));
        assert_eq!(image.promote(to(Test, 2, 6)).unwrap(), (None, None));
        assert_eq!(at(&image, &Selector::Default), 1);
        assert_eq!(at(&image, &Selector::Channel(Test)), 2);
        assert_eq!(at(&image, &Selector::Channel(Maintenance)), 3);
        assert!(image.promote(to(Maintenance, 1, 5)).is_err());
        assert!(image.promote(to(Production, 9, 5)).unwrap_err().to_string().contains("it has 1, 2, 3"));
    }

    #[test]
    fn reverting_goes_back_stepwise_and_skips_removed_versions() {
        use Channel::{Production, Test};
        let mut image = image(4);
        assert_eq!(image.revert(Test).unwrap_err().kind(), StoreErrorKind::NotFound);
        for (version, before) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3))] {
            assert_eq!(image.promote(to(Production, version, 5)).unwrap().0, before);
        }
        image.promote(to(Test, 4, 5)).unwrap();
        image.retire(3, true).unwrap();
        assert_eq!(image.revert(Production).unwrap(), (4, Some(2)));
        image.forget(3);
        assert_eq!(image.revert(Production).unwrap(), (2, Some(1)));
        assert_eq!(at(&image, &Selector::Default), 1);
        // The other channel did not move.
        assert_eq!(at(&image, &Selector::Channel(Test)), 4);
    }

    #[test]
    fn reverting_the_first_promotion_sets_the_channel_back_to_none() {
        use Channel::Production;
        let mut image = image(3);
        image.promote(to(Production, 1, 5)).unwrap();
        assert_eq!(image.revert(Production).unwrap(), (1, None));
        assert_eq!(at(&image, &Selector::Default), 3);
        assert_eq!(image.revert(Production).unwrap_err().kind(), StoreErrorKind::NotFound);
        // Before version 1 the channel was not set, but that is not its last position.
        image.promote(to(Production, 1, 5)).unwrap();
        image.promote(to(Production, 2, 6)).unwrap();
        image.retire(1, true).unwrap();
        assert_eq!(image.revert(Production).unwrap_err().kind(), StoreErrorKind::Invalid);
        assert_eq!(at(&image, &Selector::Default), 2);
    }

    #[test]
    fn all_channels_that_hold_a_version_are_named() {
        use Channel::{Production, Test};
        let mut image = image(2);
        for channel in [Test, Production] {
            image.promote(to(channel, 1, 5)).unwrap();
        }
        let held = image.held_by(1).unwrap();
        assert!(held.starts_with("test and production point to it; promote"), "{held}");
        image.promote(to(Production, 2, 5)).unwrap();
        image.schedule(to(Production, 1, 100)).unwrap();
        let held = image.held_by(1).unwrap();
        assert!(held.contains("test points to it") && held.contains("promoted to production"), "{held}");
    }

    #[test]
    fn an_image_with_set_channels_is_not_removed_without_force() {
        use Channel::{Production, Test};
        let mut image = image(3);
        image.check_removal(None).unwrap();
        // The newest version is always there, and nobody set it.
        image.promote(to(Production, 1, 5)).unwrap();
        image.schedule(to(Test, 2, 100)).unwrap();
        let refused = image.check_removal(None).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::InUse);
        assert_eq!(
            refused.to_string(),
            "cannot remove image 'deb': production points to version 1, and version 2 will be promoted to test; \
             'headwater image remove deb --force' removes it with its channels"
        );
        for (number, kind) in
            [(1, StoreErrorKind::InUse), (2, StoreErrorKind::InUse), (9, StoreErrorKind::NotFound)]
        {
            assert_eq!(image.check_removal(Some(number)).unwrap_err().kind(), kind, "{number}");
        }
        image.check_removal(Some(3)).unwrap();
        // It is removed as soon as none of its versions is left.
        image.cancel(Test).unwrap();
        image.revert(Production).unwrap();
        image.check_removal(None).unwrap();
    }

    #[test]
    fn a_scheduled_promotion_happens_once_whatever_the_clock_does() {
        use Channel::Production;
        let mut image = image(2);
        image.promote(to(Production, 1, 10)).unwrap();
        image.schedule(to(Production, 2, 100)).unwrap();
        assert!(image.retire(2, true).unwrap_err().to_string().contains("will be promoted"));
        assert_eq!(image.promote_due(99), []);
        let done = image.promote_due(5000);
        assert_eq!((done[0].0.version, done[0].1), (2, Some(1)));
        assert_eq!(at(&image, &Selector::Default), 2);
        // The clock was set back: nothing is undone, and nothing happens twice.
        image.revert(Production).unwrap();
        assert_eq!(image.promote_due(50), []);
        assert_eq!(image.promote_due(6000), []);
        assert_eq!(at(&image, &Selector::Default), 1);
    }

    #[test]
    fn promotions_replace_and_cancellations_remove_scheduled_promotions() {
        use Channel::{Production, Test};
        let mut image = image(3);
        assert_eq!(image.schedule(to(Production, 2, 100)).unwrap(), None);
        assert_eq!(image.schedule(to(Production, 3, 200)).unwrap(), Some(to(Production, 2, 100)));
        assert_eq!(image.schedule(to(Test, 2, 100)).unwrap(), None);
        assert_eq!(image.scheduled().len(), 2);
        // A refused promotion cancels nothing.
        image.promote(to(Production, 9, 5)).unwrap_err();
        assert_eq!(image.promote(to(Production, 1, 5)).unwrap(), (None, Some(to(Production, 3, 200))));
        assert_eq!(image.scheduled().len(), 1);
        // The same if the channel points there already.
        image.schedule(to(Production, 2, 300)).unwrap();
        assert_eq!(image.promote(to(Production, 1, 6)).unwrap(), (Some(1), Some(to(Production, 2, 300))));
        assert_eq!(image.cancel(Test).unwrap().version, 2);
        assert_eq!(image.cancel(Test).unwrap_err().kind(), StoreErrorKind::NotFound);
        assert_eq!(image.promote_due(u64::MAX), []);
    }

    #[test]
    fn a_version_with_an_identity_is_not_the_default() {
        let mut there = image(3);
        there.versions[2].keeps_identity = true;
        let mut here = Image::empty("deb".parse().unwrap());
        here.adopt(&there.versions[2]).unwrap();
        let refused = here.select(&Selector::Default).unwrap_err().to_string();
        assert!(refused.contains("not generalised") && refused.contains("deb@3 production"), "{refused}");
        assert_eq!((here.booted(), at(&here, &Selector::Number(3))), (None, 3));
        let adopted = here.adopt(&there.versions[1]).unwrap().unwrap();
        assert_eq!((adopted.booted, adopted.boots, at(&here, &Selector::Default)), (None, Some(2), 2));
        assert_eq!(at(&here, &Selector::Channel(Channel::Maintenance)), 3);
        here.promote(to(Channel::Production, 3, 5)).unwrap();
        assert_eq!(at(&here, &Selector::Default), 3);
    }

    #[test]
    fn a_retired_version_is_not_chosen_and_comes_back() {
        let mut image = image(2);
        image.retire(2, true).unwrap();
        assert_eq!(at(&image, &Selector::Default), 1);
        assert_eq!(at(&image, &Selector::Number(2)), 2);
        assert!(image.promote(to(Channel::Test, 2, 0)).unwrap_err().to_string().contains("retired"));
        image.retire(1, true).unwrap();
        assert!(image.select(&Selector::Default).unwrap_err().to_string().contains("only retired"));
        image.retire(2, false).unwrap();
        image.promote(to(Channel::Production, 2, 0)).unwrap();
        assert_eq!(image.retire(2, true).unwrap_err().kind(), StoreErrorKind::InUse);
    }

    #[test]
    fn the_past_is_bounded() {
        let mut image = image(2);
        for round in 0..100 {
            image.promote(to(Channel::Test, 1 + round % 2, u64::from(round))).unwrap();
        }
        // One more, which marks that older positions existed.
        assert_eq!(image.pointers().len(), CHANNEL_PAST_MAX - 1);
        assert_eq!(image.channel(Channel::Test).unwrap().at_s, 99);
    }

    /// The image as it is read again.
    fn stored(image: &Image) -> Image {
        let read = Image::decode(&image.name, &image.encode().unwrap()).unwrap();
        assert_eq!(&read, image);
        read
    }

    fn stays_at(mut image: Image, version: u32) {
        let before = image.clone();
        let refused = image.revert(Channel::Production).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Invalid);
        assert!(refused.to_string().contains("removed or forgotten: promote the version"), "{refused}");
        assert_eq!((at(&image, &Selector::Default), &image), (version, &before));
    }

    #[test]
    fn a_channel_whose_earlier_version_was_removed_is_not_unset() {
        use Channel::{Production, Test};
        let mut image = image(5);
        image.promote(to(Production, 1, 5)).unwrap();
        image.promote(to(Test, 2, 5)).unwrap();
        image.promote(to(Production, 2, 6)).unwrap();
        image.forget(1);
        let mut image = stored(&image);
        // Each position is shown once, and the other channel is still at its first position.
        assert_eq!(image.pointers(), [to(Test, 2, 5), to(Production, 2, 6)]);
        stays_at(image.clone(), 2);
        assert_eq!(image.clone().revert(Test).unwrap(), (2, None));
        // It is still known after steps forward and back, and after another removal.
        image.promote(to(Production, 3, 7)).unwrap();
        assert_eq!(image.revert(Production).unwrap(), (3, Some(2)));
        stays_at(stored(&image), 2);
        image.promote(to(Production, 3, 8)).unwrap();
        image.revert(Test).unwrap();
        image.forget(2);
        stays_at(stored(&image), 3);
        // Nothing of it is left after the last version is removed.
        for number in [3, 4, 5] {
            image.forget(number);
        }
        assert!(stored(&image).cut_short.is_empty());
    }

    #[test]
    fn a_version_removed_between_two_positions_keeps_the_first() {
        use Channel::Production;
        let mut image = image(3);
        for version in 1..=3 {
            image.promote(to(Production, version, 5)).unwrap();
        }
        image.forget(2);
        let mut image = stored(&image);
        assert_eq!(image.revert(Production).unwrap(), (3, Some(1)));
        assert_eq!(image.revert(Production).unwrap(), (1, None));
    }

    #[test]
    fn a_channel_that_dropped_its_oldest_positions_is_not_unset() {
        use Channel::Production;
        let mut image = image(100);
        for version in 1..=40 {
            image.promote(to(Production, version, 5)).unwrap();
            image = stored(&image);
        }
        // The oldest position that it has is version 10.
        for version in (11..=40).rev() {
            assert_eq!(image.revert(Production).unwrap(), (version, Some(version - 1)));
        }
        stays_at(image, 10);
    }

    #[test]
    fn a_partial_copy_remembers_earlier_channel_positions() {
        use Channel::Production;
        let mut there = image(3);
        for version in 1..=2 {
            there.promote(to(Production, version, 5)).unwrap();
        }
        let mut here = image(3);
        here.forget(1);
        here.follow(&there);
        assert_eq!(here.pointers(), [to(Production, 2, 5)]);
        stays_at(stored(&here), 2);
        // Even if the other store knows no more than that.
        there.forget(1);
        let mut here = image(3);
        here.follow(&there);
        stays_at(stored(&here), 2);
    }
}
