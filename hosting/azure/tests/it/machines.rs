//! Tests the life of machines: create, start, stop, reset, remove, and what Azure refuses.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use headwater_azure::arm::resources::{Generation, definition, disk_for_upload, gallery, version};
use headwater_azure::blob::GivenUrl;
use headwater_azure::machines::{Place, Power, WhenOff};
use headwater_azure::sizes::offers;
use headwater_azure::{Arm, AzureErrorKind, HttpClient, Machines, Pacer, PacerOptions, PageBlob};
use headwater_testkit_azure::arm::{ArmFault, Family, FaultRule, Size};
use serde_json::json;

use crate::lab::{IMAGE, Lab, choice, id, scope, spec};

fn rule(method: &'static str, contains: &str, fault: ArmFault) -> FaultRule {
    FaultRule { method: Some(method), contains: contains.to_owned(), skip: 0, fault }
}

#[tokio::test]
async fn a_machine_is_created_with_its_place_and_adopted_later() {
    let lab = Lab::new(1).await;
    let mut wanted = spec(1);
    wanted.choices[0].full_copy = true;
    wanted.zones = vec!["2".to_owned()];
    let created = lab.machines().create(&id(1), &wanted).await.unwrap();
    assert!(!created.is_adopted && created.state.power == Power::On, "{created:?}");
    assert_eq!((created.state.place, created.state.zone.as_deref()), (Place::Temp, Some("2")));
    assert_eq!(created.state.image, IMAGE);
    {
        let management = lab.server.management();
        let put =
            management.log.iter().find(|it| it.method == "PUT" && it.path.contains("/virtualMachines/"));
        let body = &put.unwrap().body;
        let disk = &body["properties"]["storageProfile"]["osDisk"];
        assert_eq!(
            disk["diffDiskSettings"],
            json!({"option": "Local", "placement": "ResourceDisk", "enableFullCaching": true})
        );
        assert_eq!(
            (disk["caching"].as_str(), disk["deleteOption"].as_str()),
            (Some("ReadOnly"), Some("Delete"))
        );
        assert_eq!(body["tags"]["headwater-machine"], id(1).as_str());
        assert_eq!(body["tags"]["headwater-owner"], "owner-a");
    }
    // A new client finds it, and changes nothing.
    let again = lab.machines().start(&id(1), &wanted).await.unwrap();
    assert!(again.is_adopted && again.state == created.state, "{again:?}");
    assert_eq!(lab.server.management().count("PUT", "/virtualMachines/"), 1);
    // Another description is not the same machine.
    let mut other = wanted.clone();
    other.image = IMAGE.replace("1.0.4", "1.0.5");
    let error = lab.machines().create(&id(1), &other).await.unwrap_err();
    assert!(
        error.kind() == AzureErrorKind::Exists && error.to_string().contains("another description"),
        "{error}"
    );
    assert!(!lab.server.management().log.iter().any(|it| it.path.ends_with("/virtualMachines")));
    assert!(lab.journal.is_empty());
}

#[tokio::test]
async fn off_means_deleted_and_the_address_stays() {
    let lab = Lab::new(1).await;
    let machines = lab.machines();
    let first = machines.create(&id(1), &spec(1)).await.unwrap();
    let error = machines.stop(&id(1), WhenOff::KeepDisk).await.unwrap_err();
    assert!(
        error.kind() == AzureErrorKind::Invalid && error.to_string().contains("a stop loses the disk"),
        "{error}"
    );
    assert_eq!(lab.server.management().count("POST", "deallocate"), 0);
    machines.stop(&id(1), WhenOff::Delete).await.unwrap();
    machines.stop(&id(1), WhenOff::Delete).await.unwrap();
    assert_eq!(machines.state(&id(1)).await.unwrap(), None);
    assert_eq!(lab.there(), (vec![], vec![format!("hw-{}", id(1).as_str())]));
    let second = machines.start(&id(1), &spec(1)).await.unwrap();
    assert_ne!(first.state.vm_id, second.state.vm_id);
    assert_eq!(lab.server.management().created[&id(1).network_path(&scope())], 1);
    machines.remove(&id(1)).await.unwrap();
    machines.remove(&id(1)).await.unwrap();
    assert_eq!(lab.there(), (vec![], vec![]));
    assert!(lab.journal.is_empty());
}

#[tokio::test]
async fn a_managed_machine_keeps_its_disk_while_it_is_off() {
    let lab = Lab::new(1).await;
    let machines = lab.machines();
    let mut wanted = spec(1);
    wanted.choices[0].place = Place::Managed;
    let created = machines.create(&id(1), &wanted).await.unwrap();
    machines.stop(&id(1), WhenOff::KeepDisk).await.unwrap();
    assert_eq!(machines.state(&id(1)).await.unwrap().unwrap().power, Power::Deallocated);
    let started = machines.start(&id(1), &wanted).await.unwrap();
    assert_eq!((started.state.power, &started.state.vm_id), (Power::On, &created.state.vm_id));
    machines.stop(&id(1), WhenOff::KeepMachine).await.unwrap();
    assert_eq!(machines.state(&id(1)).await.unwrap().unwrap().power, Power::Off);
    // A managed disk cannot be set back, so the machine is made again.
    let reset = machines.reset(&id(1), &wanted).await.unwrap();
    assert!(reset.state.power == Power::On && reset.state.vm_id != created.state.vm_id, "{reset:?}");
    assert_eq!(lab.server.management().count("POST", "reimage"), 0);
    machines.remove(&id(1)).await.unwrap();
    let left: Vec<String> = lab.server.management().resources.keys().cloned().collect();
    assert!(left.iter().all(|path| path.contains("/galleries/")), "{left:?}");
}

#[tokio::test]
async fn a_reset_reimages_or_makes_the_machine_again() {
    let lab = Lab::new(1).await;
    let (machines, path) = (lab.machines(), id(1).machine_path(&scope()));
    let created = machines.create(&id(1), &spec(1)).await.unwrap();
    let reset = machines.reset(&id(1), &spec(1)).await.unwrap();
    assert_eq!(reset.state.vm_id, created.state.vm_id);
    assert_eq!(lab.server.management().machines[&path].reimages, 1);
    machines.restart(&id(1)).await.unwrap();
    assert_eq!(lab.server.management().machines[&path].boots, 3);
    // Azure refuses to reimage.
    let refused = ArmFault::Refused(409, "PropertyChangeNotAllowed", "customData");
    lab.server.management().rules.push(rule("POST", "reimage", refused));
    let second = machines.reset(&id(1), &spec(1)).await.unwrap();
    assert_ne!(second.state.vm_id, created.state.vm_id);
    // A new version of the image needs a new machine.
    let newer = IMAGE.replace("1.0.4", "1.0.5");
    let version = lab.server.management().resources[IMAGE].clone();
    lab.server.management().resources.insert(newer.clone(), version);
    let mut wanted = spec(1);
    wanted.image = newer.clone();
    let third = machines.reset(&id(1), &wanted).await.unwrap();
    assert!(third.state.image == newer && third.state.vm_id != second.state.vm_id, "{third:?}");
    assert_eq!(lab.there().0.len(), 1);
    assert!(lab.journal.is_empty());
}

#[tokio::test]
async fn zones_and_backup_sizes_are_tried_and_refusals_remembered() {
    let lab = Lab::new(1).await;
    {
        let mut management = lab.server.management();
        let mut first = Size::new("Standard_D8ds_v5", "D", 8, "ResourceDisk");
        first.capacity = [("1", 0), ("2", 0), ("3", 1)].map(|(zone, left)| (zone.to_owned(), left)).into();
        let mut restricted = Size::new("Standard_E8ds_v5", "E", 8, "ResourceDisk");
        restricted.is_restricted = true;
        management.sizes = vec![first, restricted, Size::new("Standard_F8ds_v6", "F", 8, "NvmeDisk")];
        management.families.insert("F".to_owned(), Family { limit: 8 });
    }
    let machines = lab.machines();
    let wanted = |number| {
        let mut wanted = spec(number);
        wanted.choices = vec![
            choice("Standard_D8ds_v5", "D", Place::Temp),
            choice("Standard_E8ds_v5", "E", Place::Temp),
            choice("Standard_F8ds_v6", "F", Place::Nvme),
        ];
        wanted.zones = ["1", "2", "3"].map(str::to_owned).to_vec();
        wanted
    };
    let one = machines.create(&id(1), &wanted(1)).await.unwrap();
    assert_eq!((one.state.size.as_str(), one.state.zone.as_deref()), ("Standard_D8ds_v5", Some("3")));
    let two = machines.create(&id(2), &wanted(2)).await.unwrap();
    assert_eq!((two.state.size.as_str(), two.state.place), ("Standard_F8ds_v6", Place::Nvme));
    assert!(two.refused.len() == 6 && two.refused[0].contains("no free machine"), "{:?}", two.refused);
    let puts = lab.server.management().count("PUT", "/virtualMachines/");
    let error = machines.create(&id(3), &wanted(3)).await.unwrap_err();
    assert_eq!(error.kind(), AzureErrorKind::Capacity);
    let said = error.to_string();
    assert!(
        said.contains("8 of 8 vCPUs used, room for 0 more machines") && said.contains("not offered"),
        "{said}"
    );
    // Only the last size was asked for; the others are remembered.
    assert_eq!(lab.server.management().count("PUT", "/virtualMachines/"), puts + 1);
    // Ten minutes later the quota is tried again, after a day everything.
    lab.server.management().families.clear();
    lab.clock.pass(Duration::from_secs(600));
    let three = machines.create(&id(3), &wanted(3)).await.unwrap();
    assert_eq!(three.state.size, "Standard_F8ds_v6");
    lab.server.management().sizes[0].capacity.clear();
    lab.clock.pass(Duration::from_secs(3600));
    assert_eq!(machines.create(&id(4), &wanted(4)).await.unwrap().state.size, "Standard_D8ds_v5");
    assert_eq!(lab.there().0.len(), 4);
    assert!(lab.journal.is_empty());
}

#[tokio::test]
async fn a_reserved_interface_is_waited_for() {
    let lab = Lab::new(1).await;
    {
        let mut management = lab.server.management();
        let mut size = Size::new("Standard_D8ds_v5", "D", 8, "ResourceDisk");
        size.capacity.insert(String::new(), 0);
        management.sizes = vec![size];
    }
    let machines = lab.machines();
    let error = machines.create(&id(1), &spec(1)).await.unwrap_err();
    assert!(error.to_string().contains("no free machine") && error.advice().is_some(), "{error}");
    // The failed machine is gone, and its address stays for the next attempt.
    assert_eq!((lab.there().0.len(), lab.there().1.len()), (0, 1));
    let begun = lab.elapsed();
    machines.remove(&id(1)).await.unwrap();
    assert!(lab.elapsed() - begun >= Duration::from_secs(150), "{:?}", lab.elapsed() - begun);
    assert_eq!(lab.there(), (vec![], vec![]));
    assert!(lab.journal.is_empty());
}

#[tokio::test]
async fn passing_troubles_of_azure_are_waited_for() {
    let lab = Lab::new(1).await;
    {
        let mut management = lab.server.management();
        let vm = "/virtualMachines/";
        let missing = ArmFault::Refused(404, "GalleryImageNotFound", "not here yet");
        let preempted = ArmFault::Refused(409, "OperationPreempted", "by a more recent operation");
        management.rules = vec![
            rule("PUT", vm, missing),
            rule("PUT", vm, missing),
            rule("PUT", vm, preempted),
            rule("PUT", vm, ArmFault::ThrottledSilently),
            rule("PUT", vm, ArmFault::CutAfter),
            rule("GET", vm, ArmFault::Unauthorized),
            rule("POST", "restart", ArmFault::Refused(409, "Conflict", "another operation is in progress")),
            rule("POST", "restart", ArmFault::CutAfter),
            rule("DELETE", vm, ArmFault::CutBefore),
            rule("DELETE", vm, ArmFault::Unavailable),
        ];
        management.lag = 3;
    }
    let machines = lab.machines();
    let created = machines.create(&id(1), &spec(1)).await.unwrap();
    assert!(created.state.power == Power::On && lab.elapsed() > Duration::from_secs(60), "{created:?}");
    machines.restart(&id(1)).await.unwrap();
    machines.stop(&id(1), WhenOff::Delete).await.unwrap();
    let management = lab.server.management();
    assert!(management.rules.is_empty(), "{:?}", management.rules);
    assert_eq!(management.created[&id(1).machine_path(&scope())], 1);
    assert_eq!(management.changed, 0);
    assert!(lab.journal.is_empty());
}

#[tokio::test]
async fn creations_wait_for_replicas() {
    let lab = Lab::new(1).await;
    // The operations last longer, so that more creations would be in progress.
    lab.server.management().looks = 4;
    let machines = lab.machines();
    let made = stream::iter(0..50).map(|number| {
        let machines = &machines;
        async move { machines.create(&id(number), &spec(number)).await }
    });
    let made: Vec<_> = made.buffer_unordered(50).collect().await;
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    {
        let management = lab.server.management();
        assert_eq!((management.creations_max, management.over_replicas, management.throttled), (20, 0, 0));
    }
    let none = Lab::new(0).await;
    let error = none.machines().create(&id(1), &spec(1)).await.unwrap_err();
    assert!(
        error.kind() == AzureErrorKind::Busy && error.to_string().contains("no complete replica"),
        "{error}"
    );
    assert_eq!(none.there(), (vec![], vec![]));
    none.server.management().resources.remove(IMAGE);
    let error = none.machines().create(&id(1), &spec(1)).await.unwrap_err();
    assert!(
        error.kind() == AzureErrorKind::NotFound && error.advice() == Some("publish the version again"),
        "{error}"
    );
}

#[tokio::test]
async fn machines_of_others_and_wrong_descriptions_are_refused() {
    let lab = Lab::new(1).await;
    let machines = lab.machines();
    let path = id(1).machine_path(&scope());
    let theirs =
        json!({"tags": {"headwater-owner": "owner-b"}, "properties": {"provisioningState": "Succeeded"}});
    lab.server.management().resources.insert(path.clone(), theirs.clone());
    for kind in [
        machines.create(&id(1), &spec(1)).await.unwrap_err().kind(),
        machines.reset(&id(1), &spec(1)).await.unwrap_err().kind(),
        machines.stop(&id(1), WhenOff::Delete).await.unwrap_err().kind(),
        machines.remove(&id(1)).await.unwrap_err().kind(),
    ] {
        assert_eq!(kind, AzureErrorKind::Exists);
    }
    assert_eq!(lab.server.management().resources[&path], theirs);
    let requests = lab.server.management().requests;
    let mut wrong = spec(2);
    wrong.os_disk_gib = 3000;
    wrong.zones = vec!["9".to_owned()];
    wrong.image = IMAGE.replace("/versions/1.0.4", "");
    let error = machines.create(&id(2), &wrong).await.unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("2040 GiB") && said.contains("a zone is") && said.contains("one version"),
        "{said}"
    );
    assert_eq!(lab.server.management().requests, requests);
    assert!(headwater_azure::MachineId::parse("6F1E0C0A-5d3b-4f52-9d41-2b8a3f1c7e90").is_err());
    // One call for a machine at a time.
    let wanted = spec(3);
    let machine = id(3);
    let (one, two) = tokio::join!(machines.create(&machine, &wanted), machines.create(&machine, &wanted));
    assert!(one.is_ok());
    assert_eq!(two.unwrap_err().kind(), AzureErrorKind::Busy);
}

/// Sends every kind of body that this crate has. `make conformance` compares the bodies with Microsoft's models.
#[tokio::test]
async fn every_kind_of_body_is_accepted() {
    let lab = Lab::new(1).await;
    let (arm, scope) = (lab.arm(), scope());
    let disk = disk_for_upload(&scope, "upload", Generation::Two, (20 << 20) + 512).unwrap();
    arm.make(&disk).await.unwrap();
    let write = json!({"access": "Write", "durationInSeconds": 86_400});
    let access = arm.act(&disk.path, "beginGetAccess", disk.api_version, &write).await.unwrap();
    assert!(access["accessSAS"].as_str().is_some_and(|it| it.contains("/blobs/0?")), "{access}");
    // The upload has no footer.
    let error = arm.act(&disk.path, "endGetAccess", disk.api_version, &json!(null)).await.unwrap_err();
    assert_eq!(error.code(), Some("InvalidVhd"), "{error}");
    lab.server.management().resources.get_mut(&disk.path).unwrap()["properties"]["diskState"] =
        "Unattached".into();
    arm.make(&gallery(&scope, "images")).await.unwrap();
    arm.make(&definition(&scope, "images", "debian", Generation::Two, true)).await.unwrap();
    arm.make(&version(&scope, "images", "debian", 4, "upload", 2)).await.unwrap();
    let machines = lab.machines();
    let mut all = spec(1);
    all.choices[0].full_copy = true;
    all.trusted_launch = true;
    all.spot = true;
    all.security_group =
        Some(format!("{}/desks", scope.path("Microsoft.Network", "networkSecurityGroups", "a")));
    all.host_group = Some(scope.path("Microsoft.Compute", "hostGroups", "a"));
    all.zones = vec!["3".to_owned()];
    all.tags.insert("team".to_owned(), "lab".to_owned());
    machines.create(&id(1), &all).await.unwrap();
    machines.reset(&id(1), &all).await.unwrap();
    let mut least = spec(2);
    (least.custom_data, least.user_data) = (None, None);
    least.choices[0].place = Place::Managed;
    machines.create(&id(2), &least).await.unwrap();
    for (number, place) in [(3, Place::Cache), (4, Place::Nvme)] {
        let mut other = spec(number);
        other.choices[0].place = place;
        machines.create(&id(number), &other).await.unwrap();
    }
    assert!(lab.journal.is_empty());
}

/// The fake has the faults that a test of an interrupted upload needs.
#[tokio::test]
async fn a_write_of_an_upload_is_killed_by_its_query() {
    let lab = Lab::new(1).await;
    let (arm, scope) = (lab.arm(), scope());
    let disk = disk_for_upload(&scope, "upload", Generation::Two, (20 << 20) + 512).unwrap();
    arm.make(&disk).await.unwrap();
    let write = json!({"access": "Write", "durationInSeconds": 86_400});
    let access = arm.act(&disk.path, "beginGetAccess", disk.api_version, &write).await.unwrap();
    let url = access["accessSAS"].as_str().unwrap().parse().unwrap();
    // Azure does not delete a disk while its upload is possible.
    assert!(arm.delete(&disk.path, disk.api_version).await.is_err());
    lab.server.management().rules.push(FaultRule {
        method: Some("PUT"),
        contains: "comp=page".to_owned(),
        skip: 1,
        fault: ArmFault::KillAfter,
    });
    let pacer = Arc::new(Pacer::new(PacerOptions::new(1), lab.clock.clone()));
    let blob = PageBlob::new(HttpClient::new().unwrap(), pacer, Box::new(GivenUrl(url)));
    blob.write(0, &Bytes::from(vec![1; 512])).await.unwrap();
    let second = Bytes::from(vec![2; 512]);
    tokio::select! {
        _ = blob.write(512, &second) => panic!("the write was answered"),
        () = lab.server.killed.notified() => {}
    }
    let pages = blob.pages().await.unwrap();
    assert_eq!((pages.len(), pages[0].end), (1, 1024));
}

/// A daemon runs them on any thread.
#[test]
fn futures_can_change_their_thread() {
    fn check<T: Send>(future: T) -> T {
        future
    }
    fn all(machines: &Machines, arm: &Arm) {
        let (machine, wanted) = (id(1), spec(1));
        drop(check(arm.recover()));
        drop(check(machines.start(&machine, &wanted)));
        drop(check(machines.reset(&machine, &wanted)));
        drop(check(machines.stop(&machine, WhenOff::Delete)));
        drop(check(machines.restart(&machine)));
        drop(check(machines.remove(&machine)));
        drop(check(offers(arm, &scope())));
    }
    // Whether it compiles is the test.
    let _ = all;
}
