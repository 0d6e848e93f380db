//! Versions that are found damaged: their alarms, from the check that finds it to what ends them.

use std::collections::HashSet;
use std::time::Instant;

use super::removals::Api;
use super::*;
use crate::{Findings, UnreadableList};

impl Fixture {
    /// What has an alarm because it is damaged.
    fn damaged(&self) -> Vec<String> {
        self.service.damage().alarms().into_iter().map(|alarm| alarm.subject).collect()
    }

    /// A check of a version ends that finds a chunk damaged.
    pub(super) async fn finds_damage(&self, version: &ImageVersion) {
        let found = Findings {
            hash: &version.hash,
            names: &[format!("{}@{}", version.image, version.number)],
            began: Instant::now(),
            repaired: 0,
            damaged_chunks: 1,
            damage: &["chunk 0".to_owned()],
            files: &[],
            remarks: &[],
            uses: &[],
        };
        self.service.version_checked(found).await;
    }
}

async fn verify(api: &Api) {
    let (status, answer) = api.ask("POST", "images/image@1/verify", "").await;
    assert!(status == 200 && answer.contains("verified"), "{answer}");
}

#[tokio::test]
async fn a_version_that_is_verified_has_an_alarm_until_it_is_verified_and_whole() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    assert!(api.ask("GET", "status", "").await.1.contains(r#""alarms":[]"#));
    verify(&api).await;
    let (_, status) = api.ask("GET", "status", "").await;
    for says in [
        r#""subject":"image image@1""#,
        "1 chunk of the version is damaged; it affects image@1: machine 'lab' boots it",
        "image verify image@1 --repair-from STORE",
    ] {
        assert!(status.contains(says), "no {says} in {status}");
    }
    let counted = async |value: u64| {
        let (_, stats) = api.ask("GET", "stats", "").await;
        let alarms =
            format!(r#"{{"metric":"headwater_alarms","labels":{{"kind":"image"}},"value":{value}.0}}"#);
        assert!(stats.contains(&alarms), "no {alarms} in {stats}");
        for metric in ["headwater_damaged_versions", "headwater_damaged_chunks"] {
            let sample = format!(r#"{{"metric":"{metric}","value":{value}.0}}"#);
            assert!(stats.contains(&sample), "no {sample} in {stats}");
        }
    };
    counted(1).await;
    fixture.host.is_whole.store(true, Ordering::SeqCst);
    verify(&api).await;
    counted(0).await;
    assert!(fixture.damaged().is_empty());
}

#[tokio::test]
async fn a_damaged_version_that_is_removed_has_no_alarm_any_more() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    verify(&api).await;
    // The machine boots this one from now on.
    let newer = version(2, "");
    fixture.host.versions.lock().unwrap().push(newer.clone());
    fixture.finds_damage(&newer).await;
    assert_eq!(fixture.damaged(), ["image image@1", "image image@2"]);
    let (status, answer) = api.ask("DELETE", "images/image@1", "").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(fixture.damaged(), ["image image@2"]);

    // A check that ends after that: while the store cannot say that it is gone, and when it can.
    let older = version(1, "");
    *fixture.host.unreadable.lock().unwrap() = Some("image@1".to_owned());
    fixture.finds_damage(&older).await;
    assert_eq!(fixture.damaged(), ["image image@1", "image image@2"]);
    *fixture.host.unreadable.lock().unwrap() = None;
    fixture.finds_damage(&older).await;
    assert_eq!(fixture.damaged(), ["image image@2"]);

    // Somebody else removes the other one: who looks for it sees that, and so does a round of checks.
    fixture.host.versions.lock().unwrap().clear();
    let (status, answer) = api.ask("POST", "images/image@2/verify", "").await;
    assert_eq!(status, ProblemKind::NotFound.http_status(), "{answer}");
    assert!(fixture.damaged().is_empty());
    fixture.host.versions.lock().unwrap().push(newer.clone());
    fixture.finds_damage(&newer).await;
    assert_eq!(fixture.damaged(), ["image image@2"]);
    // All of the image may be hidden by one wrong answer.
    fixture.service.versions_listed(&HashSet::new(), &[], Instant::now()).await;
    assert_eq!(fixture.damaged(), ["image image@2"]);
    fixture.service.versions_listed(&HashSet::new(), &[], Instant::now()).await;
    assert!(fixture.damaged().is_empty());
}

#[tokio::test]
async fn a_list_that_cannot_be_read_is_an_alarm_with_the_machines_of_the_image() {
    let fixture = Fixture::new().await;
    let list = |is_of_later_release| {
        let (image, why) = ("image".to_owned(), "the list is cut".to_owned());
        [UnreadableList { image, why, is_of_later_release }]
    };
    fixture.service.versions_listed(&HashSet::new(), &list(true), Instant::now()).await;
    let advice = fixture.service.damage().alarms().remove(0).advice;
    assert!(advice.contains("the release that wrote it"), "{advice}");
    fixture.service.versions_listed(&HashSet::new(), &list(false), Instant::now()).await;
    let alarms = fixture.service.damage().alarms();
    assert_eq!(fixture.damaged(), ["image image"]);
    assert!(alarms.iter().all(|alarm| alarm.advice.contains("keep the damaged list until you are certain")));
    let says =
        "its list of versions cannot be read: the list is cut; it affects image: machine 'lab' boots it";
    assert_eq!(alarms.first().map(|alarm| alarm.message.as_str()), Some(says));
    fixture.service.versions_listed(&HashSet::from(["image@1"]), &[], Instant::now()).await;
    assert!(fixture.damaged().is_empty());
}
