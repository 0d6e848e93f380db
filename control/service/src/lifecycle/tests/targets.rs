//! Machines that boot from the network: registered by their card, looked up by it, and not started by the daemon.

use super::removals::Api;
use super::*;

const CARD: &str = "52:54:00:aa:bb:0c";
const CREATE: &str =
    r#"{"name":"pc-1","image":"image","boot":"network","mac":"52-54-00-AA-BB-0C","host_name":"desk"}"#;

#[tokio::test]
async fn a_target_is_found_by_its_card_and_boots_what_its_image_means() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let (status, answer) = api.ask("POST", "machines", CREATE).await;
    assert_eq!(status, 201, "{answer}");
    assert!(answer.contains(CARD) && answer.contains(r#""mode":"ram""#), "{answer}");
    assert_eq!(fixture.service.target(CARD).await.unwrap().as_deref(), Some("pc-1"));
    let boot = fixture.service.target_boot(CARD).await.unwrap().unwrap();
    assert_eq!((boot.machine.as_str(), boot.identity.host_name.as_str()), ("pc-1", "desk"));
    assert_eq!((boot.version.number, boot.cache_ram_bytes), (1, 512 << 20));
    fixture.service.target_refused(CARD, "image@1: no kernel").await.unwrap();
    let (_, refused) = api.ask("GET", "machines/pc-1", "").await;
    assert!(refused.contains("it cannot boot: image@1: no kernel"), "{refused}");
    fixture.service.target_boots(CARD, "image@1").await.unwrap();
    let (_, shown) = api.ask("GET", "machines/pc-1", "").await;
    assert!(!shown.contains("it cannot boot"), "{shown}");
    assert!(shown.contains(r#""version":"image@1""#) && shown.contains(r#""boot":"network""#), "{shown}");
    let (_, events) = api.ask("GET", "events?subject=machine%20pc-1", "").await;
    assert!(events.contains("image@1, from the network"), "{events}");
    // A virtual machine is not found so, whatever its card.
    let vm = fixture.record().await;
    assert_eq!(fixture.service.target(&vm.mac).await.unwrap(), None);
    assert!(fixture.service.target_boot("52:54:00:00:00:00").await.unwrap().is_none());
}

#[tokio::test]
async fn the_daemon_does_not_start_a_target() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    assert_eq!(api.ask("POST", "machines", CREATE).await.0, 201);
    for verb in ["start", "reset"] {
        let (status, answer) = api.ask("POST", &format!("machines/pc-1/{verb}"), "").await;
        assert_eq!(status, 409, "{answer}");
        assert!(answer.contains("it boots from the network"), "{answer}");
    }
    assert_eq!(api.ask("DELETE", "machines/pc-1", "").await.0, 204);
    assert_eq!(fixture.service.target(CARD).await.unwrap(), None);
}

/// Notes what it wakes, and fails for the machine `dark`.
#[derive(Default)]
struct NotedWakes(Mutex<Vec<String>>);

#[async_trait]
impl crate::backend::Wake for NotedWakes {
    async fn wake(&self, machine: &str, mac: &str) -> Result<String, BackendError> {
        if machine == "dark" {
            return Err(BackendError::new(ProblemKind::Failed, "no such outlet"));
        }
        self.0.lock().unwrap().push(format!("{machine} {mac}"));
        Ok(format!("packet to {mac}"))
    }
}

#[tokio::test]
async fn a_target_is_woken_if_something_can_do_that() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let wakes = Arc::new(NotedWakes::default());
    fixture.service.wakes_with(Some(wakes.clone()));
    let dark = CREATE.replace("pc-1", "dark").replace("0C", "0D");
    for create in [CREATE, &dark] {
        assert_eq!(api.ask("POST", "machines", create).await.0, 201);
    }
    let (status, answer) = api.ask("POST", "machines/pc-1/start", "").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(*wakes.0.lock().unwrap(), [format!("pc-1 {CARD}")]);
    let (_, events) = api.ask("GET", "events?subject=machine%20pc-1", "").await;
    assert!(events.contains(r#""action":"wake""#) && events.contains("packet to"), "{events}");
    let (status, answer) = api.ask("POST", "machines/dark/start", "").await;
    assert!(status == 500 && answer.contains("no such outlet"), "{status} {answer}");
    // A recording is of the daemon's disks, and a target has none there.
    let (status, answer) = api.ask("POST", "machines/pc-1/start?record=true", "").await;
    assert!(status == 409 && answer.contains("it boots from the network"), "{status} {answer}");
}

#[tokio::test]
async fn what_makes_no_target_is_refused_and_leaves_nothing() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let ram_disk = r#""cache":{"mode":"ram+disk"}"#;
    let cases = [
        (r#""boot":"network""#.to_owned(), 400, "give --mac"),
        (r#""boot":"network","mac":"52:54:00:aa:bb""#.to_owned(), 400, "is not the MAC address of"),
        (format!(r#""boot":"network","mac":"{CARD}",{ram_disk}"#), 400, "give --cache ram"),
        (format!(r#""boot":"network","mac":"{CARD}","user_data":"x""#), 400, "no user data"),
    ];
    for (fields, expected, why) in cases {
        let body = format!(r#"{{"name":"pc-2","image":"image",{fields}}}"#);
        let (status, answer) = api.ask("POST", "machines", &body).await;
        assert_eq!(status, expected, "{body}: {answer}");
        assert!(answer.contains(why), "{body}: {answer}");
        assert_eq!(api.ask("GET", "machines/pc-2", "").await.0, 404);
    }
    assert_eq!(api.ask("POST", "machines", CREATE).await.0, 201);
    let twice = CREATE.replace("pc-1", "pc-2");
    let (status, answer) = api.ask("POST", "machines", &twice).await;
    assert_eq!(status, 409, "{answer}");
    assert!(answer.contains("machine 'pc-1' already has the MAC address"), "{answer}");
}
