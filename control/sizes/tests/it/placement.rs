//! Tests placement: a table of sizes, disks and expected places, and every reason why a place is refused.

use headwater_sizes::place::{PlaceReason, SizeRefusal};
use headwater_sizes::size::{GIB, NvmeDisks};
use headwater_sizes::{Generation, MachineSize, NotPlaced, OsDiskPlace, Question, SizeTable, place};

use crate::{question, size};
use OsDiskPlace::{Cache, Managed, Nvme, Temp};

/// Places a disk on one size.
fn on(
    name: &str,
    change: impl FnOnce(&mut Question),
    os_disk_gib: u64,
) -> Result<headwater_sizes::Placement, NotPlaced> {
    let mut asked = question(os_disk_gib);
    change(&mut asked);
    place(&size(name), &asked)
}

fn local(asked: &mut Question) {
    asked.places = vec![Cache, Temp, Nvme];
}

fn full(asked: &mut Question) {
    local(asked);
    asked.full_copy = true;
}

/// Why a place is refused on a size.
fn reason(found: Result<headwater_sizes::Placement, NotPlaced>, place: OsDiskPlace) -> PlaceReason {
    let refused = found.expect_err("it is refused");
    let refusal = refused.places.into_iter().find(|refusal| refusal.place == place);
    refusal.expect("this place is refused").why
}

#[test]
fn each_size_holds_a_disk_where_its_figures_say() {
    // Size, OS disk in GiB; place, temp disk left, NVMe disks left, IOPS.
    for (name, os_disk_gib, expected) in [
        ("Standard_D8s_v3", 127, (Cache, Some(64), 0, Some(16_000))),
        ("Standard_DS3_v2", 127, (Cache, Some(28), 0, Some(16_000))),
        ("Standard_DS3_v2", 172, (Cache, Some(28), 0, Some(16_000))),
        ("Standard_DS3_v2", 173, (Managed, Some(28), 0, Some(12_800))),
        ("Standard_D8ds_v5", 127, (Temp, Some(173), 0, Some(38_000))),
        ("Standard_D2ds_v5", 75, (Temp, Some(0), 0, Some(9000))),
        ("Standard_D2ds_v5", 76, (Managed, Some(75), 0, Some(3750))),
        // The cache has 30 GiB. The temp disk can hold the disk, so no managed disk is used.
        ("Standard_B20ms", 128, (Temp, Some(32), 0, Some(10_800))),
        ("Standard_B20ms", 30, (Cache, Some(160), 0, Some(10_800))),
        // A cache is offered, but its space is not published.
        ("Standard_E4d_v5", 30, (Temp, Some(120), 0, Some(19_000))),
        // Whole disks are used, with their share of the rate.
        ("Standard_D2ads_v6", 30, (Nvme, Some(0), 0, Some(37_500))),
        ("Standard_D16ads_v6", 127, (Nvme, Some(0), 1, Some(150_000))),
        ("Standard_D16ads_v6", 441, (Nvme, Some(0), 0, Some(300_000))),
        // The NVMe disks exist, but cannot hold the OS disk.
        ("Standard_NC24ads_A100_v4", 257, (Managed, Some(64), 1, None)),
        ("Standard_L8s_v3", 100, (Managed, Some(80), 1, Some(12_800))),
        // The size lists cache rates, but has no cache.
        ("Standard_D2_v5", 30, (Managed, Some(0), 0, None)),
        ("Standard_D4s_v4", 30, (Managed, Some(0), 0, Some(6400))),
        // A temp disk, but no ephemeral OS disks.
        ("Standard_D2_v2", 30, (Managed, Some(100), 0, None)),
    ] {
        let found = on(name, |_| {}, os_disk_gib).unwrap_or_else(|why| panic!("{name}: {why}"));
        let temp_gib = found.left.temp_bytes.map(|bytes| bytes / GIB);
        let found = (found.place, temp_gib, found.left.nvme_disks, found.read.iops);
        assert_eq!(found, expected, "{name}, {os_disk_gib} GiB");
    }
}

#[test]
fn the_smallest_sizes_for_a_windows_disk_are_the_known_ones() {
    let table = SizeTable::built_in();
    let smallest = |series: &str, change: fn(&mut Question)| {
        let mut asked = question(127);
        change(&mut asked);
        let holds = |size: &&MachineSize| size.series == series && place(size, &asked).is_ok();
        table.sizes.iter().find(holds).map(|size| size.name.clone())
    };
    for (series, change, expected) in [
        ("Dsv3", local as fn(&mut Question), Some("Standard_D8s_v3")),
        ("DSv2", local, Some("Standard_DS3_v2")),
        ("Ddsv4", local, Some("Standard_D4ds_v4")),
        ("Ddsv5", local, Some("Standard_D4ds_v5")),
        ("Ddsv6", local, Some("Standard_D4ds_v6")),
        ("Dsv4", local, None),
        ("Ddsv5", full, Some("Standard_D8ds_v5")),
        ("Ddsv6", full, Some("Standard_D8ds_v6")),
        ("Dsv3", full, None),
    ] {
        assert_eq!(smallest(series, change).as_deref(), expected, "{series}");
    }
}

#[test]
fn a_full_copy_needs_more_than_twice_the_disk_and_a_gib() {
    // 300 GiB of temp disk: 2 x 149 + 1 = 299 is less, 2 x 150 + 1 is more.
    let found = on("Standard_D8ds_v5", full, 149).expect("it fits");
    assert_eq!((found.place, found.taken_bytes, found.left.temp_bytes), (Temp, 298 * GIB, Some(2 * GIB)));
    let small =
        |needs| PlaceReason::TooSmall { has_bytes: 300 * GIB, needs_bytes: needs * GIB, is_exclusive: true };
    assert_eq!(reason(on("Standard_D8ds_v5", full, 150), Temp), small(301));
    // Exactly twice the disk and 1 GiB is not enough.
    let mut odd = size("Standard_D8ds_v5");
    odd.temp_bytes = Some(301 * GIB);
    let mut asked = question(150);
    full(&mut asked);
    assert!(place(&odd, &asked).is_err());
    odd.temp_bytes = Some(301 * GIB + 1);
    assert!(place(&odd, &asked).is_ok());
    // On NVMe, the number of disks is computed from twice the OS disk.
    let found = on("Standard_D16ds_v6", full, 230).expect("it fits");
    assert_eq!((found.taken_bytes, found.left.nvme_disks), (880 * GIB, 0));
    let found = on("Standard_D16ds_v6", full, 220).expect("it fits");
    assert_eq!((found.taken_bytes, found.left.nvme_disks), (440 * GIB, 1));
}

#[test]
fn a_full_copy_is_refused_if_it_is_not_offered() {
    assert_eq!(reason(on("Standard_D4ds_v5", full, 30), Temp), PlaceReason::FullCopyNeedsVcpus { has: 4 });
    assert_eq!(reason(on("Standard_D8s_v3", full, 30), Cache), PlaceReason::FullCopyNotDocumented);
    let with_managed = |asked: &mut Question| asked.full_copy = true;
    // It does not fall back to a managed disk without a full copy.
    assert_eq!(reason(on("Standard_D4ds_v5", with_managed, 30), Managed), PlaceReason::ManagedHasNoFullCopy);
}

#[test]
fn trusted_launch_takes_a_gib_and_generation_2() {
    let trusted = |asked: &mut Question| {
        local(asked);
        asked.trusted_launch = true;
    };
    // Microsoft's own example: 74 GiB of 75.
    let found = on("Standard_D2ads_v5", trusted, 74).expect("it fits");
    assert_eq!((found.taken_bytes, found.left.temp_bytes), (75 * GIB, Some(0)));
    let why = reason(on("Standard_D2ads_v5", trusted, 75), Temp);
    assert_eq!(
        why,
        PlaceReason::TooSmall { has_bytes: 75 * GIB, needs_bytes: 76 * GIB, is_exclusive: false }
    );
    let mut first_only = size("Standard_D2ads_v5");
    first_only.generations = vec![Generation::One];
    let mut asked = question(30);
    trusted(&mut asked);
    let why = place(&first_only, &asked).expect_err("no UEFI").size;
    assert_eq!(why, [SizeRefusal::OtherGeneration { image: Generation::Two, size: vec![Generation::One] }]);
}

#[test]
fn an_image_boots_only_on_sizes_of_its_generation_and_processor() {
    let of = |generation| move |asked: &mut Question| asked.image.generation = Some(generation);
    let why = on("Standard_D8ds_v6", of(Generation::One), 30).expect_err("UEFI only");
    assert_eq!(
        why.size,
        [SizeRefusal::OtherGeneration { image: Generation::One, size: vec![Generation::Two] }]
    );
    assert!(on("Standard_D8ds_v6", of(Generation::Two), 30).is_ok());
    assert!(on("Standard_D8ds_v5", of(Generation::One), 30).is_ok());
    let why = on("Standard_D16plds_v5", |_| {}, 30).expect_err("Arm");
    assert_eq!(why.to_string(), "its processors are arm64, but the image is for x64");
}

#[test]
fn a_disk_above_the_clouds_limit_has_no_place() {
    let at_limit = on("Standard_D96ds_v5", local, 2040).expect("the limit is inclusive");
    assert_eq!(at_limit.place, Temp);
    let above = PlaceReason::AboveLimit { max_bytes: 2040 * GIB };
    assert_eq!(reason(on("Standard_D96ds_v5", local, 2041), Temp), above);
    assert_eq!(on("Standard_D96ds_v5", |_| {}, 4095).expect("managed").place, Managed);
    let above = PlaceReason::AboveLimit { max_bytes: 4095 * GIB };
    assert_eq!(reason(on("Standard_D96ds_v5", |_| {}, 4096), Managed), above);
}

#[test]
fn a_place_that_leaves_too_little_is_passed_over() {
    let left = |gib: u64| move |asked: &mut Question| asked.temp_left_bytes = gib * GIB;
    assert_eq!(on("Standard_B20ms", left(32), 128).expect("32 are left").place, Temp);
    // The temp disk can hold the disk but leaves only 32 GiB, so the next place is chosen.
    assert_eq!(on("Standard_B20ms", left(33), 128).expect("managed").place, Managed);
    let only_local = |asked: &mut Question| {
        local(asked);
        asked.temp_left_bytes = 33 * GIB;
    };
    let why = reason(on("Standard_B20ms", only_local, 128), Temp);
    assert_eq!(why, PlaceReason::TooLittleLeft { left_bytes: 32 * GIB, wanted_bytes: 33 * GIB });
    // The cache uses no space of the temp disk.
    assert_eq!(on("Standard_D8s_v3", left(64), 127).expect("64 are left").place, Cache);
    // NVMe disks that the OS disk does not use count as free, the others do not.
    assert_eq!(on("Standard_D16ds_v6", left(440), 30).expect("one disk is left").place, Nvme);
    assert_eq!(on("Standard_D8ds_v6", left(1), 30).expect("managed").place, Managed);
}

#[test]
fn only_named_places_are_taken_in_their_order() {
    let order = |places: &[OsDiskPlace]| {
        let places = places.to_vec();
        move |asked: &mut Question| asked.places = places
    };
    assert_eq!(on("Standard_D8ds_v4", order(&[Cache, Temp]), 30).expect("both fit").place, Cache);
    assert_eq!(on("Standard_D8ds_v4", order(&[Temp, Cache]), 30).expect("both fit").place, Temp);
    assert_eq!(on("Standard_D8ds_v4", order(&[Managed, Cache]), 30).expect("both fit").place, Managed);
    let refused = on("Standard_D8ds_v4", order(&[Nvme]), 30).expect_err("no NVMe");
    assert_eq!(refused.to_string(), "nvme: not offered");
}

#[test]
fn a_refusal_names_each_place_with_what_it_has_and_needs() {
    let refused = on("Standard_D4s_v3", local, 127).expect_err("too small");
    let said = "cache: has 100 GiB, needs 127 GiB; temp: has 32 GiB, needs 127 GiB; nvme: not offered";
    assert_eq!(refused.to_string(), said);
    let retired = on("Standard_NV12s_v3", local, 127).expect_err("retired");
    assert_eq!(retired.to_string(), "retired on 2026-09-30");
    let demanding = |asked: &mut Question| {
        asked.vcpus_min = 8;
        asked.memory_min_bytes = 300 * GIB;
    };
    // The guest gets 2 of the 8 vCPUs.
    let refused = on("Standard_M8-2ms", demanding, 30).expect_err("too few");
    assert_eq!(refused.to_string(), "2 of 8 vCPUs; 218.75 GiB of 300 GiB memory");
}

#[test]
fn space_that_is_not_published_is_never_enough() {
    let why = reason(on("Standard_E4d_v5", |asked| asked.places = vec![Cache], 30), Cache);
    assert_eq!(why, PlaceReason::NotPublished);
    let mut unknown = size("Standard_D8s_v3");
    unknown.temp_bytes = None;
    let mut asked = question(30);
    assert_eq!(place(&unknown, &asked).expect("in the cache").left.temp_bytes, None);
    // Unpublished space does not count as left either.
    asked.temp_left_bytes = GIB;
    assert!(place(&unknown, &asked).is_err());
}

#[test]
fn figures_at_the_end_of_the_range_do_not_overflow() {
    let mut huge = size("Standard_D16ds_v6");
    huge.nvme = Some(NvmeDisks { count: u64::MAX, each_bytes: u64::MAX });
    huge.nvme_read.iops = Some(u64::MAX);
    let mut asked = question(2040);
    full(&mut asked);
    asked.trusted_launch = true;
    let found = place(&huge, &asked).expect("it fits");
    assert_eq!((found.place, found.left.nvme_disks, found.read.iops), (Nvme, u64::MAX - 1, Some(1)));
    asked.image.os_disk_bytes = u64::MAX;
    assert!(place(&huge, &asked).is_err());
}

#[test]
fn contradictory_questions_are_refused() {
    let wrong = |change: fn(&mut Question)| {
        let mut asked = question(127);
        change(&mut asked);
        asked.check().expect_err("no sense").to_string()
    };
    assert_eq!(question(127).check(), Ok(()));
    for (change, words) in [
        ((|asked| asked.image.os_disk_bytes = 0) as fn(&mut Question), "whole GiB"),
        (|asked| asked.image.os_disk_bytes = GIB + 512, "whole GiB"),
        (|asked| asked.places = vec![], "no place"),
        (|asked| asked.places = vec![Cache, Temp, Cache], "cache is named twice"),
        (
            |asked| {
                asked.places = vec![Managed];
                asked.full_copy = true;
            },
            "a full copy needs a local place",
        ),
        (
            |asked| {
                asked.trusted_launch = true;
                asked.image.generation = Some(Generation::One);
            },
            "generation 2",
        ),
    ] {
        let said = wrong(change);
        assert!(said.contains(words), "{said}");
    }
}
