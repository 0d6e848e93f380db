//! Tests that resources are created exactly once, whatever fails and whenever the client is killed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_azure::arm::resources::{Generation, Scope, disk_for_upload};
use headwater_azure::{
    Arm, AzureError, AzureErrorKind, Clock, Credential, Endpoints, HttpClient, Pacer, PacerOptions, Resource,
    TokenSource,
};
use headwater_testkit_azure::arm::{ArmFault, ArmServer, FaultRule};
use serde_json::json;

use crate::lab::Kept;

/// A clock whose waits end at once; the clock advances by the wait.
#[derive(Debug, Default)]
struct Fast(Mutex<Duration>);

#[async_trait]
impl Clock for Fast {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    async fn sleep(&self, duration: Duration) {
        *self.0.lock().unwrap() += duration;
        tokio::task::yield_now().await;
    }
}

/// The state that outlives a client: the server, the journal, and the number of created machines.
struct World {
    server: ArmServer,
    journal: Arc<Kept>,
    clock: Arc<Fast>,
    secret: tempfile::NamedTempFile,
    made: Mutex<usize>,
}

impl World {
    async fn new() -> Self {
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(secret.path(), "secret").unwrap();
        Self {
            server: ArmServer::start().await,
            journal: Arc::default(),
            clock: Arc::default(),
            secret,
            made: Mutex::default(),
        }
    }

    fn client(&self) -> Arm {
        let http = HttpClient::new().unwrap();
        let pacer = || Pacer::new(PacerOptions::new(3), self.clock.clone());
        let endpoints = Endpoints {
            authority: self.server.url.clone(),
            management: self.server.url.clone(),
            metadata: self.server.url.clone(),
        };
        let credential = Credential::ClientSecret {
            tenant: "tenant".to_owned(),
            client: "client".to_owned(),
            secret_file: self.secret.path().to_owned(),
        };
        let tokens = TokenSource::new(http.clone(), pacer(), self.clock.clone(), endpoints, credential);
        let owner = "owner-a".to_owned();
        Arm::new(http, Arc::new(pacer()), self.clock.clone(), Arc::new(tokens), self.journal.clone(), owner)
    }

    /// Continues the work of the last client.
    async fn make_all(&self, count: usize) -> Result<(), AzureError> {
        let client = self.client();
        client.recover().await?;
        loop {
            let next = *self.made.lock().unwrap();
            if next >= count {
                return Ok(());
            }
            client.make(&resource(next)).await?;
            *self.made.lock().unwrap() += 1;
        }
    }

    /// Runs clients one after the other, each until it is killed. Returns the number of clients.
    async fn make_all_though_killed(&self, count: usize) -> usize {
        for clients in 1.. {
            tokio::select! {
                made = self.make_all(count) => {
                    made.unwrap();
                    return clients;
                }
                () = self.server.killed.notified() => {}
            }
        }
        unreachable!("a client was not killed, but has not created all resources")
    }

    /// The next request with this method for a resource is refused.
    fn refuse(&self, method: &'static str, path: &str, fault: ArmFault) {
        let rule = FaultRule { method: Some(method), contains: path.to_owned(), skip: 0, fault };
        self.server.management().rules.push(rule);
    }

    fn assert_each_is_there_once(&self, count: usize, when: &str) {
        let management = self.server.management();
        let expected: Vec<String> = (0..count).map(|number| resource(number).path).collect();
        let mut expected_sorted = expected.clone();
        expected_sorted.sort();
        let there: Vec<String> = management.resources.keys().cloned().collect();
        assert_eq!(there, expected_sorted, "{when}");
        for path in &expected {
            let state = &management.resources[path]["properties"]["provisioningState"];
            assert_eq!((management.created[path], state.as_str()), (1, Some("Succeeded")), "{when}: {path}");
        }
        assert_eq!(management.changed, 0, "{when}");
        assert!(self.journal.is_empty(), "{when}");
    }
}

/// Every second resource has a kind for which Azure honours `If-None-Match`.
fn resource(number: usize) -> Resource {
    let scope = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces";
    Resource {
        path: format!("{scope}/headwater-{number}"),
        api_version: "2024-05-01",
        body: json!({
            "location": "westeurope", "tags": {"number": number.to_string()},
            "properties": {"enableAcceleratedNetworking": false},
        }),
        is_conditional: number.is_multiple_of(2),
    }
}

#[tokio::test]
async fn a_client_killed_at_each_request_leaves_no_orphan_and_no_duplicate() {
    let whole = World::new().await;
    whole.make_all(3).await.unwrap();
    whole.assert_each_is_there_once(3, "nobody was killed");
    let requests = whole.server.management().requests;
    assert!(requests >= 12, "{requests}");
    for at in 0..requests {
        for (fault, lag) in [(ArmFault::KillBefore, 0), (ArmFault::KillAfter, 0), (ArmFault::KillAfter, 2)] {
            let world = World::new().await;
            world.server.management().faults.insert(at, fault);
            world.server.management().lag = lag;
            assert_eq!(world.make_all_though_killed(3).await, 2);
            world.assert_each_is_there_once(3, &format!("{fault:?} at {at}, lag {lag}"));
        }
    }
}

#[tokio::test]
async fn fifty_resources_are_made_by_clients_that_are_killed_again_and_again() {
    let world = World::new().await;
    world.server.management().lag = 1;
    for number in 1..500 {
        let fault = if number % 2 == 0 { ArmFault::KillBefore } else { ArmFault::KillAfter };
        world.server.management().faults.insert(number * 9, fault);
    }
    let clients = world.make_all_though_killed(50).await;
    assert!(clients > 20, "{clients}");
    world.assert_each_is_there_once(50, "50 resources");
}

#[tokio::test]
async fn faults_of_the_service_change_nothing_but_the_time() {
    let world = World::new().await;
    {
        let mut management = world.server.management();
        management.lag = 2;
        let faults = [ArmFault::Throttled, ArmFault::CutAfter, ArmFault::Unavailable, ArmFault::Unauthorized];
        management.faults.extend((0..1000).map(|number| (number * 3, faults[number % 4])));
    }
    world.make_all(20).await.unwrap();
    world.assert_each_is_there_once(20, "with faults");
}

#[tokio::test]
async fn resources_of_others_are_left_alone() {
    let world = World::new().await;
    let theirs =
        json!({"tags": {"headwater-owner": "owner-b"}, "properties": {"provisioningState": "Succeeded"}});
    let path = resource(0).path;
    world.server.management().resources.insert(path.clone(), theirs.clone());
    let client = world.client();
    let error = client.make(&resource(0)).await.unwrap_err();
    assert!(
        error.kind() == AzureErrorKind::Exists && error.to_string().contains("has not created"),
        "{error}"
    );
    assert_eq!(client.delete(&path, "2024-05-01").await.unwrap_err().kind(), AzureErrorKind::Exists);
    assert_eq!(world.server.management().resources[&path], theirs);
    // The same name with another description.
    client.make(&resource(1)).await.unwrap();
    let mut other = resource(1);
    other.body = json!({"location": "northeurope", "properties": {}});
    let error = client.make(&other).await.unwrap_err();
    assert!(error.to_string().contains("another description"), "{error}");
    client.delete(&resource(1).path, "2024-05-01").await.unwrap();
    client.delete(&resource(1).path, "2024-05-01").await.unwrap();
    assert_eq!(world.server.management().resources.len(), 1);
}

#[tokio::test]
async fn a_missing_group_or_subscription_does_not_mean_that_a_resource_is_gone() {
    for code in ["ResourceGroupNotFound", "SubscriptionNotFound"] {
        let world = World::new().await;
        world.client().make(&resource(0)).await.unwrap();
        let path = resource(0).path;
        // The look before the removal, and the removal itself.
        for method in ["GET", "DELETE"] {
            world.refuse(method, &path, ArmFault::Refused(404, code, "not found"));
            let error = world.client().delete(&path, "2024-05-01").await.unwrap_err();
            assert_eq!(error.kind(), AzureErrorKind::NotFound, "{error}");
            assert!(error.to_string().contains(code) && error.advice().is_some(), "{error}");
        }
        assert!(world.server.management().resources.contains_key(&path));
        world.client().delete(&path, "2024-05-01").await.unwrap();
        world.assert_each_is_there_once(0, code);
    }
}

#[tokio::test]
async fn a_provider_that_is_not_registered_is_explained() {
    let world = World::new().await;
    let message = "The subscription is not registered to use namespace 'Microsoft.Network'.";
    let refused = ArmFault::Refused(409, "MissingSubscriptionRegistration", message);
    world.refuse("PUT", &resource(0).path, refused);
    let error = world.client().make(&resource(0)).await.unwrap_err();
    assert_eq!(error.kind(), AzureErrorKind::Denied, "{error}");
    assert!(error.to_string().contains(message), "{error}");
    assert!(error.advice().is_some_and(|advice| advice.contains("az provider register")), "{error}");
    // The refusal is certain: one look for the resource is enough.
    assert_eq!(world.server.management().count("GET", &resource(0).path), 2);
    world.client().make(&resource(0)).await.unwrap();
    world.assert_each_is_there_once(1, "registered");
}

#[tokio::test]
async fn failed_resources_are_deleted_and_explained() {
    for (code, message, kind) in [
        ("QuotaExceeded", "cores", AzureErrorKind::Quota),
        ("OperationNotAllowed", "exceeds the approved Quota of 10", AzureErrorKind::Quota),
        ("ZonalAllocationFailed", "no room", AzureErrorKind::Capacity),
        ("OperationNotAllowed", "the disk is attached", AzureErrorKind::Failed),
    ] {
        let world = World::new().await;
        world.server.management().failure = Some((code, message));
        let error = world.client().make(&resource(0)).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(code) && error.to_string().contains(message), "{error}");
        world.assert_each_is_there_once(0, code);
        // The name can be used again.
        world.server.management().failure = None;
        world.client().make(&resource(0)).await.unwrap();
    }
}

#[tokio::test]
async fn a_disk_for_an_upload_has_a_length_that_azure_takes() {
    let scope =
        Scope { subscription: "s".to_owned(), group: "g".to_owned(), region: "westeurope".to_owned() };
    let disk = |bytes| disk_for_upload(&scope, "headwater-debian-4", Generation::Two, bytes);
    let made = disk((30 << 20) + 512).unwrap();
    assert_eq!(made.body["properties"]["creationData"]["uploadSizeBytes"], (30 << 20) + 512);
    assert_eq!(
        made.path,
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/headwater-debian-4"
    );
    for odd in [30 << 20, (30 << 20) + 1024, (19 << 20) + 512, 0] {
        assert_eq!(disk(odd).unwrap_err().kind(), AzureErrorKind::Invalid, "{odd}");
    }
}
