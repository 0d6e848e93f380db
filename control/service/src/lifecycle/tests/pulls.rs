//! Versions that come from another store: what the history says of them, how far they are, and who goes away meanwhile.

use headwater_api::{PullReport, PulledImage};
use tokio::io::AsyncReadExt;

use super::removals::Api;
use super::*;

impl Host {
    /// Brings the next version of the image, which all machines boot from then on that follow it.
    pub(super) async fn pull(
        &self,
        order: PullOrder,
        control: &TaskControl,
        told: &mpsc::Sender<Pulled>,
    ) -> Result<PullOutcome, BackendError> {
        let source = order.source.clone();
        self.pulls.lock().unwrap().push(order);
        let newest = {
            let mut versions = self.versions.lock().unwrap();
            let number = versions.len() as u64 + 1;
            versions.push(version(number, ""));
            number
        };
        control.report(4, 9);
        let image = PulledImage {
            image: "image".to_owned(),
            versions: vec![newest],
            newest: true,
            followed: true,
            booted: Some(newest - 1),
            boots: Some(newest),
            ..PulledImage::default()
        };
        told.send(Pulled { source, image, tried: self.answer().err() }).await.unwrap();
        while self.pulls_wait.load(Ordering::SeqCst) && !control.is_cancelled() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if control.is_cancelled() {
            return Err(BackendError::new(ProblemKind::Cancelled, "stopped"));
        }
        Ok(PullOutcome {
            report: PullReport { versions: 1, bytes: 9, ..PullReport::default() },
            not_copied: vec![("image@9".to_owned(), BackendError::new(ProblemKind::Damaged, "it is cut"))],
        })
    }
}

impl Fixture {
    /// Who pulled, and what came of it, as the history has it; the newest comes first.
    async fn pulled(&self) -> Vec<(String, String, String)> {
        let pulled = self.events().await.into_iter().filter(|event| event.action.starts_with("pull"));
        pulled.map(|event| (event.caller, event.action, event.detail)).collect()
    }
}

const CAME: &str = "version 2 from /srv/images, with channels, notes and retired marks; machines now boot version 2 \
                    instead of version 1";

#[tokio::test]
async fn the_history_says_who_pulled_what_from_where() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.edit().await;
    let (status, answer) =
        api.ask("POST", "pull", r#"{"source":"/srv/images","images":["image@2","image:test"]}"#).await;
    assert_eq!(status, 200, "{answer}");
    for says in [
        r#""kind":"pulled","versions":1,"present":0,"objects":0,"bytes":9,"followed":0,"#,
        r#""newest":true,"followed":true,"booted":1,"boots":2,"edited_by":"lab""#,
        r#""not_copied":[{"kind":"damaged","message":"image@9","causes":["it is cut"]}]"#,
    ] {
        assert!(answer.contains(says), "no {says} in {answer}");
    }
    let asked: Vec<String> = fixture
        .host
        .pulls
        .lock()
        .unwrap()
        .iter()
        .flat_map(|it| &it.images)
        .map(ToString::to_string)
        .collect();
    assert_eq!(asked, ["image@2", "image:test"]);
    let pulled = fixture.pulled().await;
    let [(caller, action, detail)] = &pulled[..] else { panic!("{pulled:?}") };
    assert!(caller.starts_with("uid ") && action == "pulled", "{pulled:?}");
    assert_eq!(detail, CAME);
}

#[tokio::test]
async fn what_cannot_be_pulled_is_refused_before_anything_is_done() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    let refused = async |body: &str, words: &str| {
        let (status, answer) = api.ask("POST", "pull", body).await;
        assert!(status == ProblemKind::Invalid.http_status() && answer.contains(words), "{answer}");
    };
    for relative in ["images", "./images", "", "s3:images"] {
        refused(&format!(r#"{{"source":"{relative}"}}"#), "neither an absolute path nor a URL").await;
    }
    refused(r#"{"source":"/srv/images","images":["Image"]}"#, "is not an image name").await;
    refused(r#"{"source":"/srv/images","image":["image"]}"#, "unknown field").await;
    fixture.host.is_read_only.store(true, Ordering::SeqCst);
    refused(r#"{"source":"/srv/images"}"#, "the store of this daemon is read-only").await;
    assert!(fixture.host.pulls.lock().unwrap().is_empty());
    assert_eq!(fixture.pulled().await, []);
}

#[tokio::test]
async fn a_pull_says_how_far_it_is() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.host.pulls_wait.store(true, Ordering::SeqCst);
    let mut client = api.send("POST", "pull", r#"{"source":"/srv/images"}"#).await;
    let mut answer = Vec::new();
    let progress = r#"{"event":"progress","done_bytes":4,"total_bytes":9}"#;
    while !String::from_utf8_lossy(&answer).contains(progress) {
        let read = client.read_buf(&mut answer).await.unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
    }
    fixture.host.pulls_wait.store(false, Ordering::SeqCst);
    client.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains(r#""event":"done""#) && !answer.contains(r#""event":"failed""#), "{answer}");
}

#[tokio::test]
async fn a_pull_goes_on_without_its_client_until_it_is_cancelled() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.host.pulls_wait.store(true, Ordering::SeqCst);
    let client = api.send("POST", "pull", r#"{"source":"/srv/images"}"#).await;
    until("the image is noted", async || !fixture.pulled().await.is_empty()).await;
    assert_eq!(fixture.service.task_counts(), (1, 0), "the pull goes on");
    let pulled = fixture.pulled().await;
    assert!(pulled.len() == 1 && pulled[0].2 == CAME, "{pulled:?}");
    drop(client);
    let (_, tasks) = api.ask("GET", "tasks?unended=true", "").await;
    let tasks = &tasks[tasks.find('{').unwrap()..=tasks.rfind('}').unwrap()];
    let tasks: headwater_api::TaskList = serde_json::from_str(tasks).unwrap();
    let task = &tasks.tasks[0];
    assert_eq!((&*task.kind, &*task.subject), ("pull", "store /srv/images"));
    assert_eq!(api.ask("POST", &format!("tasks/{}/cancel", task.id), "").await.0, 200);
    let state = async || api.ask("GET", &format!("tasks/{}", task.id), "").await.1;
    until("it has ended", async || state().await.contains(r#""state":"cancelled""#)).await;
    assert_eq!(fixture.service.task_counts(), (0, 0));
    assert_eq!(fixture.pulled().await.len(), 1);
    // It has ended: there is nothing to cancel.
    assert_eq!(api.ask("POST", &format!("tasks/{}/cancel", task.id), "").await.0, 409);
}

#[tokio::test]
async fn a_pull_whose_answer_from_the_store_is_lost_is_noted_as_tried() {
    let fixture = Fixture::new().await;
    let api = Api::serve(&fixture).await;
    fixture.host.answers_lost.store(true, Ordering::SeqCst);
    assert_eq!(api.ask("POST", "pull", r#"{"source":"/srv/images"}"#).await.0, 200);
    let pulled = fixture.pulled().await;
    let told: Vec<_> = pulled.iter().map(|(_, action, detail)| (action.as_str(), detail.as_str())).collect();
    let tried = "versions from /srv/images; it may or may not have been done: nobody answered";
    assert_eq!(told, [("pull tried", tried), ("pulled", CAME)]);
}
