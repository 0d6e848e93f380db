//! Implements the service's trait [`Cloud`] with `headwater_azure`: connections, versions in the gallery of a connection,
//! and machines of these versions ([`machines`]).
//!
//! Each work (a version that is published, a sweep, all machines) has its own journal in the database ([`journal`]). The parts that
//! limit the rate of requests, and the tokens, are shared by all work on a connection. [`inspect`] looks into a version,
//! and [`pages`] reads it for the upload.

mod inspect;
mod journal;
mod machines;
mod pages;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::{Connection, ConnectionAuth, ConnectionCheck, ImageVersion, ProblemKind, PublishedImage};
use headwater_azure::arm::access;
use headwater_azure::arm::resources::{Generation, Scope};
use headwater_azure::machines::is_of_machine;
use headwater_azure::publish::{self, Rest};
use headwater_azure::{
    Arm, AzureError, AzureErrorKind, ClientSecret, Clock, Credential, Endpoints, HostClock, HttpClient,
    Pacer, PacerOptions, Publication, Step, TokenSource,
};
use headwater_db::{ConnectionRecord, Database};
use headwater_service::backend::{
    BackendError, Cloud, CloudFacts, PublishCheck, PublishOrder, TaskControl, UnpublishOrder,
};
use headwater_store::Store;
use uuid::Uuid;

use crate::adapters::disks::blocking;
use journal::DbJournal;
use machines::MachinesOfConnection;
use pages::VersionPages;

/// The variable with the file of a cluster's token, which Kubernetes sets.
const TOKEN_FILE: &str = "AZURE_FEDERATED_TOKEN_FILE";

/// How long the check of a connection may take, because somebody waits for it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// The clouds of all connections: Azure.
pub struct AzureClouds {
    store: Arc<dyn Store>,
    db: Arc<dyn Database>,
    /// The owner of the resources of connections that are added now. An earlier connection keeps its owner.
    owner: String,
    clock: Arc<dyn Clock>,
    shared: Mutex<SharedParts>,
}

/// The parts that all work shares.
#[derive(Default)]
struct SharedParts {
    http: Option<Arc<HttpClient>>,
    /// By the name of the connection. Replaced if the record, for example its client secret, has changed.
    connected: HashMap<String, Connected>,
    /// By subscription and region.
    pacers: HashMap<(String, String), Arc<Pacer>>,
    /// By the name of the connection; replaced as `connected`.
    machines: HashMap<String, Arc<MachinesOfConnection>>,
}

struct Connected {
    record: ConnectionRecord,
    tokens: Arc<TokenSource>,
}

impl AzureClouds {
    /// Clouds whose new connections are for the owner with this identifier. No request is sent yet.
    pub fn new(store: Arc<dyn Store>, db: Arc<dyn Database>, owner: String) -> Self {
        let clock = Arc::new(HostClock::start());
        Self { store, db, owner, clock, shared: Mutex::default() }
    }

    fn http(&self) -> Result<Arc<HttpClient>, BackendError> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(http) = &shared.http {
            return Ok(http.clone());
        }
        let http = HttpClient::new().map_err(azure_failed)?;
        shared.http = Some(http.clone());
        Ok(http)
    }

    /// A client for one piece of work on a connection.
    fn arm(&self, record: &ConnectionRecord, scope: &str) -> Result<Arc<Arm>, BackendError> {
        let connection = record.connection.name.clone();
        self.arm_with(record, DbJournal::new(self.db.clone(), connection, scope.to_owned()))
    }

    fn arm_with(&self, record: &ConnectionRecord, journal: DbJournal) -> Result<Arc<Arm>, BackendError> {
        let http = self.http()?;
        let connection = &record.connection;
        let seed = Uuid::new_v4().as_u64_pair().0;
        let pacer = || Pacer::new(PacerOptions::new(seed), self.clock.clone());
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let of_group = (connection.subscription.clone(), connection.region.clone());
        let group_pacer = shared.pacers.entry(of_group).or_insert_with(|| Arc::new(pacer())).clone();
        let known = shared.connected.get(&connection.name).filter(|known| known.record == *record);
        let tokens = match known {
            Some(known) => known.tokens.clone(),
            None => {
                let endpoints = Endpoints {
                    authority: connection.authority.clone(),
                    management: connection.management.clone(),
                    ..Endpoints::default()
                };
                let credential = credential(record)?;
                let tokens =
                    TokenSource::new(http.clone(), pacer(), self.clock.clone(), endpoints, credential);
                let tokens = Arc::new(tokens);
                let connected = Connected { record: record.clone(), tokens: tokens.clone() };
                shared.connected.insert(connection.name.clone(), connected);
                tokens
            }
        };
        drop(shared);
        let owner = record.owner.clone();
        Ok(Arc::new(Arm::new(http, group_pacer, self.clock.clone(), tokens, Arc::new(journal), owner)))
    }

    /// As [`Cloud::check`], but it retries for as long as a long operation does.
    async fn checked(&self, record: &ConnectionRecord) -> Result<ConnectionCheck, BackendError> {
        let (arm, scope) = (self.arm(record, "check")?, scope_of(&record.connection));
        let identity = arm.identity().await.map_err(azure_failed)?;
        let group_region = access::group_region(&arm, &scope).await.map_err(azure_failed)?;
        let mut remarks = Vec::new();
        let lacks = match access::lacking(&arm, &scope).await {
            Ok(lacks) => lacks.into_iter().map(str::to_owned).collect(),
            Err(error) if error.kind() == AzureErrorKind::Denied => {
                remarks.push(format!("the rights are not known: {error}"));
                Vec::new()
            }
            Err(error) => return Err(azure_failed(error)),
        };
        if group_region != record.connection.region {
            remarks.push(format!(
                "the resource group is in {group_region}; resources are made in {}",
                record.connection.region
            ));
        }
        Ok(ConnectionCheck {
            connection: record.connection.name.clone(),
            identity: identity.unwrap_or_else(|| "not named in the token".to_owned()),
            group_region,
            lacks,
            remarks,
        })
    }
}

/// The place of a version in Azure.
fn publication(
    record: &ConnectionRecord,
    published: &PublishedImage,
    has_nvme: bool,
) -> Result<Publication, BackendError> {
    let number = u32::try_from(published.version).map_err(|_| {
        let what = format!("there is no version {}", published.version);
        BackendError::new(ProblemKind::NotFound, what)
    })?;
    Ok(Publication {
        scope: scope_of(&record.connection),
        gallery: Publication::gallery_of(&record.owner),
        image: published.image.clone(),
        number,
        content: published.hash.clone(),
        generation: if published.generation == 1 { Generation::One } else { Generation::Two },
        has_nvme,
        replicas: published.replicas,
    })
}

/// The journal of the work on a version.
fn work_on(published: &PublishedImage) -> String {
    format!("image {}@{}", published.image, published.version)
}

fn scope_of(connection: &Connection) -> Scope {
    let Connection { subscription, group, region, .. } = connection.clone();
    Scope { subscription, group, region }
}

fn credential(record: &ConnectionRecord) -> Result<Credential, BackendError> {
    let Connection { tenant, client_id, auth, name, .. } = &record.connection;
    let client = || client_id.clone().unwrap_or_default();
    Ok(match auth {
        ConnectionAuth::Secret => {
            let secret = record.secret.as_ref().map(|secret| secret.reveal()).unwrap_or_default();
            let secret = ClientSecret::new(secret.to_owned());
            Credential::KnownSecret { tenant: tenant.clone(), client: client(), secret }
        }
        ConnectionAuth::Identity => Credential::ManagedIdentity { client: client_id.clone() },
        ConnectionAuth::Workload => {
            let token_file = std::env::var_os(TOKEN_FILE).map(PathBuf::from).ok_or_else(|| {
                let what = format!(
                    "connection '{name}' needs the token of a Kubernetes cluster, but {TOKEN_FILE} is not set in the \
                     environment of the daemon"
                );
                BackendError::new(ProblemKind::Unavailable, what)
                    .advise("run the daemon in a pod with a workload identity, or add the connection with --auth secret")
            })?;
            Credential::WorkloadIdentity { tenant: tenant.clone(), client: client(), token_file }
        }
    })
}

/// Fails if a setting cannot be part of a path or URL of Azure.
fn check_settings(connection: &Connection) -> Result<(), String> {
    let Connection { subscription, tenant, group, region, client_id, authority, management, .. } = connection;
    let only = |text: &str, more: &str, most: usize| {
        let is_fine = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        !text.is_empty() && text.len() <= most && text.chars().all(is_fine)
    };
    if Uuid::parse_str(subscription).is_err() {
        return Err(format!("'{}' is not the UUID of a subscription", subscription.escape_debug()));
    }
    if !only(tenant, ".-", 255) {
        return Err(format!("'{}' is not a tenant: write its UUID or domain", tenant.escape_debug()));
    }
    if !only(group, "_-.()", 90) || group.ends_with('.') {
        return Err(format!("'{}' is not the name of a resource group", group.escape_debug()));
    }
    if !only(region, "", 60) || region.chars().any(|c| c.is_ascii_uppercase()) {
        return Err(format!(
            "'{}' is not a region: write its short name, such as westeurope",
            region.escape_debug()
        ));
    }
    if let Some(client) = client_id
        && Uuid::parse_str(client).is_err()
    {
        return Err(format!("'{}' is not a client ID, which is a UUID", client.escape_debug()));
    }
    for url in [authority, management] {
        check_url(url)?;
    }
    Ok(())
}

/// Fails if a URL is not that of a service that secrets may be sent to.
fn check_url(text: &str) -> Result<(), String> {
    let shown = text.escape_debug();
    let url: hyper::Uri = text.parse().map_err(|_| format!("'{shown}' is not a URL"))?;
    let host = url.host().unwrap_or_default();
    let is_here = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    let is_private = url.scheme_str() == Some("https") || (url.scheme_str() == Some("http") && is_here);
    if !is_private || host.is_empty() || url.authority().is_some_and(|it| it.as_str().contains('@')) {
        return Err(format!("'{shown}' is not an https:// URL"));
    }
    if url.path() != "/" || url.query().is_some() {
        return Err(format!("'{shown}' has a path: write https://HOST only"));
    }
    Ok(())
}

#[async_trait]
impl Cloud for AzureClouds {
    fn owner(&self) -> String {
        self.owner.clone()
    }

    fn accept(&self, record: &ConnectionRecord) -> Result<(), BackendError> {
        check_settings(&record.connection).map_err(|why| BackendError::new(ProblemKind::Invalid, why))?;
        credential(record).map(drop)
    }

    async fn check(&self, record: &ConnectionRecord) -> Result<ConnectionCheck, BackendError> {
        let checked = tokio::time::timeout(CHECK_TIMEOUT, self.checked(record)).await;
        checked.unwrap_or_else(|_| {
            let what = format!("Azure did not answer within {} s", CHECK_TIMEOUT.as_secs());
            Err(BackendError::new(ProblemKind::Unavailable, what)
                .advise("check the network; a managed identity works only on a machine in Azure"))
        })
    }

    async fn inspect(&self, version: &ImageVersion) -> Result<CloudFacts, BackendError> {
        let (store, version) = (self.store.clone(), version.clone());
        blocking("look into an image", move || inspect::inspect(&*store, &version)).await
    }

    async fn check_publish(&self, order: &PublishOrder) -> Result<PublishCheck, BackendError> {
        let ConnectionCheck { lacks, remarks, .. } = self.checked(&order.connection).await?;
        if !lacks.is_empty() {
            let what = format!(
                "the identity lacks {} on resource group {}",
                lacks.join(", "),
                order.connection.connection.group
            );
            return Err(BackendError::new(ProblemKind::Unavailable, what)
                .advise("give it the role Contributor on the resource group, or a role with these rights"));
        }
        let publication = publication(&order.connection, &order.published, order.nvme)?;
        // The layout is refused here too, before anything is made.
        let (store, version) = (self.store.clone(), order.version.clone());
        blocking("read a version", move || VersionPages::open(&*store, &version).map(drop)).await?;
        let arm = self.arm(&order.connection, &work_on(&order.published))?;
        publish::check(&arm, &publication).await.map_err(azure_failed)?;
        Ok(PublishCheck { resource: publication.version_path(), remarks })
    }

    async fn is_published(&self, order: &PublishOrder) -> Result<bool, BackendError> {
        let publication = publication(&order.connection, &order.published, order.nvme)?;
        let arm = self.arm(&order.connection, &work_on(&order.published))?;
        publish::is_there(&arm, &publication).await.map_err(azure_failed)
    }

    async fn publish(&self, order: &PublishOrder, control: Arc<TaskControl>) -> Result<u64, BackendError> {
        let publication = publication(&order.connection, &order.published, order.nvme)?;
        let (store, version) = (self.store.clone(), order.version.clone());
        let pages = blocking("read a version", move || VersionPages::open(&*store, &version)).await?;
        let arm = self.arm(&order.connection, &work_on(&order.published))?;
        let (http, layout) = (self.http()?, pages.layout());
        let report = |step| show(&control, step);
        let sent = publish::publish(&arm, &http, &publication, &layout, &pages, &report).await;
        sent.map_err(azure_failed)
    }

    async fn unpublish(&self, order: &UnpublishOrder, control: Arc<TaskControl>) -> Result<(), BackendError> {
        let publication = publication(&order.connection, &order.published, false)?;
        let arm = self.arm(&order.connection, &work_on(&order.published))?;
        let rest = Rest { definition: order.is_last_of_image, gallery: order.is_last };
        let report = |step| show(&control, step);
        publish::unpublish(&arm, &publication, rest, &report).await.map_err(azure_failed)
    }

    async fn orphans(
        &self,
        record: &ConnectionRecord,
        published: &[PublishedImage],
        machines: &[Uuid],
    ) -> Result<Vec<String>, BackendError> {
        let mut needed = self.paths_of(record, machines)?;
        for row in published {
            let publication = publication(record, row, false)?;
            needed.push(publication.version_path());
            needed.push(publication.definition_path());
            needed.push(publication.gallery_path());
            needed.push(publication.disk_path());
        }
        let arm = self.arm(record, "sweep")?;
        let mut owned = self.owned_machines(record).await?;
        owned.extend(publish::owned(&arm, &scope_of(&record.connection)).await.map_err(azure_failed)?);
        let is_needed = |path: &str| needed.iter().any(|needed| needed.eq_ignore_ascii_case(path));
        Ok(owned.into_iter().filter(|path| !is_needed(path)).collect())
    }

    async fn remove_orphan(&self, record: &ConnectionRecord, resource: &str) -> Result<(), BackendError> {
        if is_of_machine(resource) {
            return self.remove_owned_machine(record, resource).await;
        }
        let arm = self.arm(record, "sweep")?;
        publish::remove_owned(&arm, resource).await.map_err(azure_failed)
    }
}

fn show(control: &TaskControl, step: Step) {
    match step {
        Step::Doing(doing) => control.report_doing(doing),
        Step::Uploaded(done_bytes, total_bytes) => control.report(done_bytes, total_bytes),
    }
}

/// Converts an error of Azure. `Forbidden` and `Unauthorized` would mean the caller of the API, so a refused identity is
/// `Unavailable`.
fn azure_failed(error: AzureError) -> BackendError {
    let kind = match error.kind() {
        AzureErrorKind::Invalid => ProblemKind::Invalid,
        AzureErrorKind::NotFound => ProblemKind::NotFound,
        AzureErrorKind::Exists | AzureErrorKind::Busy => ProblemKind::Conflict,
        AzureErrorKind::Damaged => ProblemKind::Damaged,
        AzureErrorKind::Denied | AzureErrorKind::Unavailable | AzureErrorKind::Unknown => {
            ProblemKind::Unavailable
        }
        _ => ProblemKind::Failed,
    };
    let failed = BackendError::new(kind, error.to_string());
    match error.advice() {
        Some(advice) => failed.advise(advice),
        None => failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> Connection {
        Connection {
            name: "prod".to_owned(),
            subscription: "11111111-2222-3333-4444-555555555555".to_owned(),
            tenant: "contoso.example".to_owned(),
            group: "vdi-(lab)".to_owned(),
            region: "westeurope".to_owned(),
            auth: ConnectionAuth::Identity,
            client_id: None,
            authority: "https://login.microsoftonline.us".to_owned(),
            management: "http://127.0.0.1:8080".to_owned(),
            created_by: String::new(),
            created_at_ms: 0,
        }
    }

    #[test]
    fn settings_that_change_a_path_or_leak_a_secret_are_refused() {
        assert_eq!(check_settings(&connection()), Ok(()));
        let refused = |change: fn(&mut Connection), part: &str| {
            let mut changed = connection();
            change(&mut changed);
            let why = check_settings(&changed).unwrap_err();
            assert!(why.contains(part), "{why}");
        };
        refused(|it| it.subscription = "lab".to_owned(), "not the UUID of a subscription");
        refused(|it| it.tenant = "a/b".to_owned(), "not a tenant");
        refused(|it| it.group = "a/../b".to_owned(), "not the name of a resource group");
        refused(|it| it.region = "West Europe".to_owned(), "short name");
        refused(|it| it.client_id = Some("app".to_owned()), "not a client ID");
        refused(|it| it.authority = "http://login.example".to_owned(), "not an https:// URL");
        refused(|it| it.authority = "https://a@login.example".to_owned(), "not an https:// URL");
        refused(|it| it.management = "https://management.example/x".to_owned(), "has a path");
        refused(|it| it.management = "management".to_owned(), "not an https:// URL");
    }
}
