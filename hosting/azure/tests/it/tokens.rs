//! Tests tokens of all three flows, and the errors if no token is granted.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_azure::{
    AzureErrorKind, Clock, Credential, Endpoints, HttpClient, Pacer, PacerOptions, TokenSource,
};
use headwater_testkit_azure::login::{ASSERTION, CLIENT, LoginServer, SECRET, TENANT};

struct Files(tempfile::TempDir);

impl Files {
    fn with(text: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret"), text).unwrap();
        Self(dir)
    }

    fn secret(&self) -> PathBuf {
        self.0.path().join("secret")
    }

    fn client_secret(&self) -> Credential {
        Credential::ClientSecret {
            tenant: TENANT.to_owned(),
            client: CLIENT.to_owned(),
            secret_file: self.secret(),
        }
    }
}

/// A clock that advances only when the test says so.
#[derive(Debug, Default)]
struct TestClock(Mutex<Duration>);

#[async_trait]
impl Clock for TestClock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    async fn sleep(&self, _: Duration) {}
}

fn source(server: &LoginServer, credential: Credential) -> TokenSource {
    source_at(server, credential, Arc::default())
}

fn source_at(server: &LoginServer, credential: Credential, clock: Arc<TestClock>) -> TokenSource {
    let mut options = PacerOptions::new(1);
    options.first_wait = Duration::ZERO;
    options.attempts = 3;
    let endpoints =
        Endpoints { authority: server.url.clone(), metadata: server.url.clone(), ..Endpoints::default() };
    TokenSource::new(
        HttpClient::new().unwrap(),
        Pacer::new(options, clock.clone()),
        clock,
        endpoints,
        credential,
    )
}

#[tokio::test]
async fn a_secret_gives_a_token_that_is_kept() {
    let (server, files) = (LoginServer::start().await, Files::with(&format!("{SECRET}\n")));
    let source = Arc::new(source(&server, files.client_secret()));
    let asking: Vec<_> = (0..8)
        .map(|_| {
            tokio::spawn({
                let source = source.clone();
                async move { source.token().await }
            })
        })
        .collect();
    for asked in asking {
        assert_eq!(&*asked.await.unwrap().unwrap(), "token-1");
    }
    assert_eq!(server.login().given, 1);
    // A token that Azure refuses is replaced, once.
    source.forget("token-1").await;
    source.forget("token-0").await;
    assert_eq!(&*source.token().await.unwrap(), "token-2");
    source.forget("token-1").await;
    assert_eq!(&*source.token().await.unwrap(), "token-2");
}

#[tokio::test]
async fn a_token_is_replaced_before_it_expires() {
    let (server, files) = (LoginServer::start().await, Files::with(SECRET));
    let clock = Arc::new(TestClock::default());
    let source = source_at(&server, files.client_secret(), clock.clone());
    assert_eq!(&*source.token().await.unwrap(), "token-1");
    *clock.0.lock().unwrap() = Duration::from_secs(3299);
    assert_eq!(&*source.token().await.unwrap(), "token-1");
    *clock.0.lock().unwrap() = Duration::from_secs(3300);
    assert_eq!(&*source.token().await.unwrap(), "token-2");
}

#[tokio::test]
async fn a_workload_shows_the_clusters_newest_token() {
    let (server, files) = (LoginServer::start().await, Files::with("an old token"));
    let credential = Credential::WorkloadIdentity {
        tenant: TENANT.to_owned(),
        client: CLIENT.to_owned(),
        token_file: files.secret(),
    };
    let source = source(&server, credential);
    assert_eq!(source.token().await.unwrap_err().kind(), AzureErrorKind::Denied);
    std::fs::write(files.secret(), ASSERTION).unwrap();
    assert_eq!(&*source.token().await.unwrap(), "token-1");
}

#[tokio::test]
async fn a_machine_asks_its_metadata_service() {
    let server = LoginServer::start().await;
    let identity = |client: Option<&str>| Credential::ManagedIdentity { client: client.map(str::to_owned) };
    assert_eq!(&*source(&server, identity(None)).token().await.unwrap(), "token-1");
    let resource = "resource=https%3A%2F%2Fmanagement.azure.com%2F";
    assert_eq!(server.login().metadata_query, format!("api-version=2018-02-01&{resource}"));
    assert_eq!(&*source(&server, identity(Some(CLIENT))).token().await.unwrap(), "token-2");
    assert_eq!(
        server.login().metadata_query,
        format!("api-version=2018-02-01&{resource}&client_id={CLIENT}")
    );
    // The service is not ready yet, as it is right after a start of the machine.
    server.login().next = vec![(503, 0), (429, 0)];
    assert_eq!(&*source(&server, identity(None)).token().await.unwrap(), "token-3");
    server.login().next = vec![(400, 0)];
    let error = source(&server, identity(None)).token().await.unwrap_err();
    assert!(error.to_string().contains("metadata service answers 400"), "{error}");
    assert!(error.advice().unwrap().contains("assign an identity to the machine"));
}

#[tokio::test]
async fn refusals_say_what_to_do_and_no_secret() {
    let (server, files) = (LoginServer::start().await, Files::with(SECRET));
    let wrong = Files::with("another");
    let elsewhere = Credential::ClientSecret {
        tenant: "fabrikam.example".to_owned(),
        client: CLIENT.to_owned(),
        secret_file: files.secret(),
    };
    let stranger = Credential::ClientSecret {
        tenant: TENANT.to_owned(),
        client: "somebody".to_owned(),
        secret_file: files.secret(),
    };
    server.login().is_expired = true;
    for (credential, parts) in [
        (files.client_secret(), ["AADSTS7000222", "has expired", "create a new secret"]),
        (wrong.client_secret(), ["AADSTS7000215", "is wrong", "secret's Value"]),
        (elsewhere, ["AADSTS90002", "tenant fabrikam.example", "give the tenant"]),
        (stranger, ["AADSTS700016", "application somebody", "belongs to the tenant"]),
        (Files::with(" \n").client_secret(), ["cannot log in", "cannot read", "write only the secret"]),
    ] {
        let source = source(&server, credential);
        let error = source.token().await.unwrap_err();
        assert_eq!(error.kind(), AzureErrorKind::Denied);
        let said = format!("{error}; {}", error.advice().unwrap());
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        let shown = format!("{said} {error:?} {source:?}");
        assert!(!shown.contains(SECRET) && !shown.contains("another"), "{shown}");
    }
    assert_eq!(server.login().given, 0);
}
