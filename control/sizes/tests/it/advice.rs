//! Advice for a whole table: the order of sizes that fit, and the main reasons of the others.

use headwater_sizes::{OsDiskPlace, SizeTable, advise};

use crate::question;

#[test]
fn every_size_is_either_advised_or_has_a_reason() {
    let table = SizeTable::built_in();
    let mut asked = question(127);
    asked.places = vec![OsDiskPlace::Cache, OsDiskPlace::Temp, OsDiskPlace::Nvme];
    asked.vcpus_min = 8;
    let advice = advise(&table, &asked).unwrap();
    assert_eq!(advice.fitting.len() + advice.others.len(), 135);
    assert!(advice.others.iter().all(|other| !other.reasons.to_string().is_empty()));
    let vcpus: Vec<u32> = advice.fitting.iter().map(|fitting| fitting.size.vcpus_available).collect();
    assert!(vcpus.is_sorted() && vcpus.first() == Some(&8), "{vcpus:?}");
    let groups = advice.groups();
    assert_eq!(groups.iter().map(|group| group.sizes.len()).sum::<usize>(), advice.others.len());
    let group =
        |name: &str| groups.iter().find(|group| group.sizes.contains(&name)).map(|group| group.reason);
    for (name, reason) in [
        ("Standard_D4ds_v5", "too few vCPUs"),
        ("Standard_M8-2ms", "too few vCPUs"),
        ("Standard_D8s_v4", "no ephemeral OS disks"),
        ("Standard_NV12s_v3", "retired"),
        ("Standard_L8s_v3", "every place is too small"),
        ("Standard_D16plds_v5", "other processors than the image is for"),
    ] {
        assert_eq!(group(name), Some(reason), "{name}");
    }
}

#[test]
fn the_reason_nearest_to_a_fit_is_the_main_one() {
    let table = SizeTable::built_in();
    let main = |change: &dyn Fn(&mut headwater_sizes::Question), name: &str| {
        let mut asked = question(127);
        asked.places = vec![OsDiskPlace::Cache, OsDiskPlace::Temp, OsDiskPlace::Nvme];
        change(&mut asked);
        let advice = advise(&table, &asked).unwrap();
        let groups = advice.groups();
        groups.iter().find(|group| group.sizes.contains(&name)).map(|group| group.reason)
    };
    let left = |asked: &mut headwater_sizes::Question| asked.temp_left_bytes = 400 << 30;
    assert_eq!(main(&left, "Standard_D8ds_v5"), Some("too little temp space is left"));
    let full = |asked: &mut headwater_sizes::Question| asked.full_copy = true;
    assert_eq!(main(&full, "Standard_D4ds_v5"), Some("a full copy needs 8 vCPUs"));
    assert_eq!(main(&full, "Standard_D8s_v3"), Some("no full copy in this series"));
    let cache = |asked: &mut headwater_sizes::Question| asked.places = vec![OsDiskPlace::Cache];
    assert_eq!(main(&cache, "Standard_E4d_v5"), Some("the space of the place is not published"));
    let nvme = |asked: &mut headwater_sizes::Question| asked.places = vec![OsDiskPlace::Nvme];
    assert_eq!(
        main(&nvme, "Standard_NC24ads_A100_v4"),
        Some("the cloud does not offer these places on the size")
    );
}
