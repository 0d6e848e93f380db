//! Creates, finds and deletes resources of Azure Resource Manager (ARM) by name. Each call may be repeated safely.
//!
//! ```text
//!   make: journal: begin --> PUT --> journal: accepted --> poll the operation --> GET --> journal: end
//!            |                |              |                   |
//!            killed here: no resource exists, or the resource exists with our tags, or its operation is in progress.
//!            A new client reads the journal, requests the resource by name, and continues from there.
//! ```
//!
//! - The name of a resource is derived from its purpose, so a second attempt has the same name, and a second `PUT`
//!   cannot create a second resource.
//! - A resource is ours if its tags contain our owner identifier and the hash of the request body. Resources of
//!   others are never changed.
//! - Resources are never searched in lists, because Azure updates lists late.
//! - After an accepted `PUT`, a resource counts as missing only if five requests within a minute got 404.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, IF_NONE_MATCH};
use hyper::{Method, Request, StatusCode};
use md5::{Digest, Md5};
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::error::{AzureError, AzureErrorKind};
use crate::http::{Answer, HttpClient};
use crate::pacer::Pacer;
use crate::token::TokenSource;

pub mod access;
mod answers;
pub mod journal;
pub mod resources;

use answers::{failed, missing, operation_url, refused};
use journal::{Entry, Journal, Verb};

/// The tag with the owner's identifier.
pub const OWNER_TAG: &str = "headwater-owner";

/// The tag with the hash of the body.
pub const BODY_TAG: &str = "headwater-body";

/// The number of requests that must get 404 before a new resource counts as missing, and the pause between them.
const FIND_ATTEMPTS: u32 = 5;
const FIND_INTERVAL: Duration = Duration::from_secs(12);

/// The most pages of a list that are read; a longer list is an error.
const PAGES_MAX: usize = 500;

/// The interval for polling an operation, unless Azure names another. Azure allows 15 polls a minute.
const POLL_INTERVAL: Duration = Duration::from_secs(4);
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// The interval for reading a resource until it is finished. Azure allows 12 reads of a machine a minute.
const SETTLE_INTERVAL: Duration = Duration::from_secs(6);

/// An operation that takes longer is given up. It continues in Azure, and a later call finds its result.
const OPERATION_MAX: Duration = Duration::from_secs(6 * 3600);

/// How many journal entries are recovered at a time.
const RECOVERED_AT_A_TIME: usize = 16;

/// A resource that should exist.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// Its path, beginning with `/subscriptions/`.
    pub path: String,
    /// The API version for resources of its kind.
    pub api_version: &'static str,
    /// The request body, without our tags.
    pub body: Value,
    /// Whether Azure honours `If-None-Match: *` for its kind.
    pub is_conditional: bool,
}

/// A client of Azure Resource Manager for one subscription in one region. All its requests share Azure's rate limits,
/// so they share a pacer.
#[derive(Debug)]
pub struct Arm {
    http: Arc<HttpClient>,
    pacer: Arc<Pacer>,
    clock: Arc<dyn Clock>,
    tokens: Arc<TokenSource>,
    journal: Arc<dyn Journal>,
    management: String,
    owner: String,
}

impl Arm {
    /// A client for the owner with this identifier. All its resources have a tag with the identifier.
    pub fn new(
        http: Arc<HttpClient>,
        pacer: Arc<Pacer>,
        clock: Arc<dyn Clock>,
        tokens: Arc<TokenSource>,
        journal: Arc<dyn Journal>,
        owner: String,
    ) -> Self {
        let management = tokens.management().to_owned();
        Self { http, pacer, clock, tokens, journal, management, owner }
    }

    /// The resource, or `None` if it does not exist. One request. A missing resource group or subscription is an error.
    pub async fn find(&self, path: &str, api_version: &str) -> Result<Option<Value>, AzureError> {
        self.find_with(path, api_version, "").await
    }

    /// The resource with the part that `query` names, such as `$expand=instanceView`. One request.
    pub async fn find_with(
        &self,
        path: &str,
        api_version: &str,
        query: &str,
    ) -> Result<Option<Value>, AzureError> {
        let action = format!("cannot read {path}");
        let url = self.url_with(path, api_version, query);
        let answer = self.send(&action, Method::GET, &url, None, false).await?;
        match answer.status {
            StatusCode::OK => Ok(Some(parsed(&action, &answer)?)),
            StatusCode::NOT_FOUND => missing(&action, &answer).map(|()| None),
            _ => Err(refused(&action, &answer)),
        }
    }

    /// The resource. If it does not exist, the error has the reason that Azure names.
    pub async fn read(&self, path: &str, api_version: &str) -> Result<Value, AzureError> {
        let action = format!("cannot read {path}");
        let answer = self.send(&action, Method::GET, &self.url(path, api_version), None, false).await?;
        match answer.status {
            StatusCode::OK => parsed(&action, &answer),
            _ => Err(refused(&action, &answer)),
        }
    }

    /// All items of a list. `query` is a further part of the query, or empty. Azure updates lists late, so no caller
    /// may learn the state of one resource from a list.
    pub async fn list(&self, path: &str, api_version: &str, query: &str) -> Result<Vec<Value>, AzureError> {
        let action = format!("cannot list {path}");
        let mut url = self.url_with(path, api_version, query);
        let mut items = Vec::new();
        for _ in 0..PAGES_MAX {
            let answer = self.send(&action, Method::GET, &url, None, false).await?;
            if answer.status != StatusCode::OK {
                return Err(refused(&action, &answer));
            }
            let mut page = parsed(&action, &answer)?;
            if let Some(Value::Array(more)) = page.get_mut("value").map(Value::take) {
                items.extend(more);
            }
            match page.get("nextLink").and_then(Value::as_str).filter(|next| !next.is_empty()) {
                Some(next) => url = next.to_owned(),
                None => return Ok(items),
            }
        }
        let what = format!("{action}: the list has more than {PAGES_MAX} pages");
        Err(AzureError::new(AzureErrorKind::Invalid, what))
    }

    /// The identifier of the owner of its resources.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The identity that the tokens name, for people.
    pub async fn identity(&self) -> Result<Option<String>, AzureError> {
        self.tokens.identity().await
    }

    /// Its clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Whether a resource has our tag.
    pub fn is_ours(&self, there: &Value) -> bool {
        owner_of(there) == Some(self.owner.as_str())
    }

    /// Creates a resource, or finds the one that an earlier call has created, and waits until Azure has finished it.
    pub async fn make(&self, resource: &Resource) -> Result<Value, AzureError> {
        let (path, action) = (&resource.path, format!("cannot make {}", resource.path));
        let body = self.tagged(resource);
        // Without this check, a `PUT` would change a resource of another owner with this name.
        if let Some(there) = self.find(path, resource.api_version).await? {
            // A resource that is being deleted does not count, whatever it was.
            if !is_deleting(&there) {
                self.check_is_ours(&there, &body, &action)?;
            }
            if let Some(there) = self.settled(path, resource.api_version, there, &action).await? {
                self.check_is_ours(&there, &body, &action)?;
                if let Some(there) = self.adopted(resource, there, &action).await? {
                    return Ok(there);
                }
            }
        }
        let entry = Entry::new(Verb::Make, path, resource.api_version, body_tag(&body));
        self.journal.begin(&entry).await.map_err(|error| error.during(&action))?;
        self.put(resource, &body, &action).await
    }

    /// Ends the work of an earlier call on an existing resource. `None` if the resource was incomplete because that call
    /// was interrupted, and is now deleted.
    async fn adopted(
        &self,
        resource: &Resource,
        there: Value,
        action: &str,
    ) -> Result<Option<Value>, AzureError> {
        let path = &resource.path;
        if !is_failed(&there) {
            self.journal.end(path).await.map_err(|error| error.during(action))?;
            return Ok(Some(there));
        }
        let open = self.journal.open().await.map_err(|error| error.during(action))?;
        if open.iter().any(|entry| entry.path == *path) {
            self.delete(path, resource.api_version).await?;
            return Ok(None);
        }
        // The resource may have been in use since, so it is not deleted.
        let advice = "it was created earlier and has failed since; inspect it, and delete it so that it is created again";
        Err(failed(action, &there).advise(advice))
    }

    /// Sends the `PUT`, and waits for the result. Also handles a lost answer, and a resource that an earlier attempt
    /// has created.
    async fn put(&self, resource: &Resource, body: &Value, action: &str) -> Result<Value, AzureError> {
        let path = &resource.path;
        let text = Bytes::from(body.to_string());
        let url = self.url(path, resource.api_version);
        let sent = self.send(action, Method::PUT, &url, Some(text), resource.is_conditional).await;
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) if error.kind() == AzureErrorKind::Unknown => {
                let there = self.find_made(path, resource.api_version).await?.ok_or(error)?;
                self.check_is_ours(&there, body, action)?;
                return self.finish(resource, body, there).await;
            }
            Err(error) => return Err(error),
        };
        match answer.status.as_u16() {
            200..=202 => {
                if let Some(url) = operation_url(&answer) {
                    self.journal.accepted(path, &url).await.map_err(|error| error.during(action))?;
                    if let Err(error) = self.wait_for(&url, action).await {
                        if is_half_made(error.kind()) {
                            // The failed resource contains nothing yet, and its name must become free.
                            self.delete(path, resource.api_version).await?;
                        }
                        return Err(error);
                    }
                }
                let there =
                    self.find_made(path, resource.api_version).await?.ok_or_else(|| vanished(action))?;
                self.finish(resource, body, there).await
            }
            // The resource exists: created by an attempt whose answer was lost, or by another owner.
            409 | 412 => {
                let error = refused(action, &answer);
                let is_certain = is_half_made(error.kind())
                    || matches!(error.kind(), AzureErrorKind::NotOffered | AzureErrorKind::Denied);
                let there = if is_certain {
                    self.find(path, resource.api_version).await?
                } else {
                    self.find_made(path, resource.api_version).await?
                };
                match there {
                    Some(there) => {
                        self.check_is_ours(&there, body, action)?;
                        self.finish(resource, body, there).await
                    }
                    None => Err(self.give_up(path, error).await),
                }
            }
            _ => Err(self.give_up(path, refused(action, &answer)).await),
        }
    }

    /// Ends the journal entry after Azure has refused the request: nothing was created.
    async fn give_up(&self, path: &str, error: AzureError) -> AzureError {
        match self.journal.end(path).await {
            Ok(()) => error,
            Err(journal) => journal.during(&error.to_string()),
        }
    }

    /// Waits until a new resource is finished. If Azure cannot finish it, the incomplete resource is deleted.
    async fn finish(&self, resource: &Resource, body: &Value, there: Value) -> Result<Value, AzureError> {
        let action = format!("cannot make {}", resource.path);
        let settled = self.settled(&resource.path, resource.api_version, there, &action).await?;
        let there = settled.ok_or_else(|| vanished(&action))?;
        self.check_is_ours(&there, body, &action)?;
        if is_failed(&there) {
            self.delete(&resource.path, resource.api_version).await?;
            return Err(failed(&action, &there));
        }
        self.journal.end(&resource.path).await.map_err(|error| error.during(&action))?;
        Ok(there)
    }

    /// Waits until no operation of Azure changes the resource. `None` if it was being deleted.
    async fn settled(
        &self,
        path: &str,
        api_version: &str,
        mut there: Value,
        action: &str,
    ) -> Result<Option<Value>, AzureError> {
        let begun = self.clock.now();
        loop {
            match state_of(&there) {
                None | Some("Succeeded" | "Failed" | "Canceled") => return Ok(Some(there)),
                Some(_) if self.clock.now().saturating_sub(begun) > OPERATION_MAX => {
                    return Err(late(action));
                }
                Some(_) => self.clock.sleep(SETTLE_INTERVAL).await,
            }
            let found = if is_deleting(&there) {
                self.find(path, api_version).await?
            } else {
                Some(self.find_made(path, api_version).await?.ok_or_else(|| vanished(action))?)
            };
            match found {
                Some(found) => there = found,
                None => return Ok(None),
            }
        }
    }

    /// Deletes a resource if it exists and is ours.
    pub async fn delete(&self, path: &str, api_version: &str) -> Result<(), AzureError> {
        let action = format!("cannot delete {path}");
        let Some(there) = self.find(path, api_version).await? else {
            return self.journal.end(path).await.map_err(|error| error.during(&action));
        };
        if owner_of(&there) != Some(self.owner.as_str()) {
            return Err(foreign(&action));
        }
        let entry = Entry::new(Verb::Delete, path, api_version, String::new());
        self.journal.begin(&entry).await.map_err(|error| error.during(&action))?;
        // Without it, Azure first asks a machine to shut down, and waits for minutes.
        let query = if path.contains("/virtualMachines/") { "forceDeletion=true" } else { "" };
        let url = self.url_with(path, api_version, query);
        let answer = self.send(&action, Method::DELETE, &url, None, false).await?;
        match answer.status.as_u16() {
            200..=202 => {
                if let Some(url) = operation_url(&answer) {
                    self.journal.accepted(path, &url).await.map_err(|error| error.during(&action))?;
                    self.wait_for(&url, &action).await?;
                }
            }
            204 => {}
            404 => missing(&action, &answer)?,
            _ => {
                let error = refused(&action, &answer);
                // The resource must still be deleted, so its entry stays.
                let is_later = error.kind() == AzureErrorKind::Busy;
                return Err(if is_later { error } else { self.give_up(path, error).await });
            }
        }
        self.journal.end(path).await.map_err(|error| error.during(&action))
    }

    /// Calls an action of a resource, and returns the result of the operation. A call whose answer was lost is repeated.
    pub async fn act(
        &self,
        path: &str,
        verb: &str,
        api_version: &str,
        body: &Value,
    ) -> Result<Value, AzureError> {
        self.act_with(path, verb, api_version, "", body).await
    }

    /// Calls an action with a further part of the query. `Null`: without a body.
    pub async fn act_with(
        &self,
        path: &str,
        verb: &str,
        api_version: &str,
        query: &str,
        body: &Value,
    ) -> Result<Value, AzureError> {
        let action = format!("cannot {verb} of {path}");
        let text = (!body.is_null()).then(|| Bytes::from(body.to_string()));
        let path = format!("{path}/{verb}");
        let entry = Entry::new(Verb::Act, &path, api_version, String::new());
        self.journal.begin(&entry).await.map_err(|error| error.during(&action))?;
        let url = self.url_with(&path, api_version, query);
        let answer = self.send(&action, Method::POST, &url, text, false).await?;
        let result = match (answer.status.as_u16(), operation_url(&answer)) {
            (200..=202, Some(url)) => {
                self.journal.accepted(&path, &url).await.map_err(|error| error.during(&action))?;
                self.wait_for(&url, &action).await
            }
            (200, None) if !answer.body.is_empty() => parsed(&action, &answer),
            (200..=204, None) => Ok(Value::Null),
            _ => Err(refused(&action, &answer)),
        };
        match result {
            // The operation continues, so its entry stays.
            Err(error) if matches!(error.kind(), AzureErrorKind::Unknown | AzureErrorKind::Unavailable) => {
                Err(error)
            }
            Err(error) => Err(self.give_up(&path, error).await),
            Ok(result) => {
                self.journal.end(&path).await.map_err(|error| error.during(&action))?;
                Ok(result)
            }
        }
    }

    /// Completes the work that a killed client has begun, and returns all journal entries. A created resource that is
    /// ours stays for the next [`Arm::make`]; a resource that was to be deleted is deleted; an action that Azure has
    /// accepted is waited for. All entries end, except those of resources that Azure does not delete yet.
    pub async fn recover(&self) -> Result<Vec<Entry>, AzureError> {
        let open = self.journal.open().await?;
        let recovered: Vec<Result<(), AzureError>> = stream::iter(open.clone())
            .map(|entry| async move { self.recover_one(&entry).await })
            .buffer_unordered(RECOVERED_AT_A_TIME)
            .collect()
            .await;
        recovered.into_iter().collect::<Result<(), AzureError>>()?;
        Ok(open)
    }

    /// As [`Arm::recover`], before a machine is deleted: a creation of the machine is not waited for, but ended.
    pub async fn recover_to_delete(&self) -> Result<(), AzureError> {
        for entry in self.journal.open().await? {
            if matches!(entry.verb, Verb::Make) && entry.path.contains("/virtualMachines/") {
                self.end_made(&entry).await?;
            } else {
                self.recover_one(&entry).await?;
            }
        }
        Ok(())
    }

    /// Deletes what an interrupted creation has made, or still makes.
    async fn end_made(&self, entry: &Entry) -> Result<(), AzureError> {
        let path = &entry.path;
        // It may become visible late.
        let there = self.find_made(path, &entry.api_version).await?;
        if there.is_none_or(|there| owner_of(&there) != Some(self.owner.as_str())) {
            let action = format!("cannot complete the interrupted request for {path}");
            return self.journal.end(path).await.map_err(|error| error.during(&action));
        }
        match self.delete(path, &entry.api_version).await {
            // The entry stays, and the caller deletes it again.
            Err(error) if error.kind() == AzureErrorKind::Busy => Ok(()),
            deleted => deleted,
        }
    }

    async fn recover_one(&self, entry: &Entry) -> Result<(), AzureError> {
        let (path, action) =
            (&entry.path, format!("cannot complete the interrupted request for {}", entry.path));
        if let Some(url) = &entry.operation {
            match self.wait_for(url, &action).await {
                Ok(_) => {}
                // The caller must be able to try again.
                Err(error)
                    if matches!(error.kind(), AzureErrorKind::Unknown | AzureErrorKind::Unavailable) =>
                {
                    return Err(error);
                }
                // Azure forgets an operation after about a day, and operations fail. The state of the resource then
                // shows how it ended.
                Err(_) => {}
            }
        }
        let there = match entry.verb {
            Verb::Make => self.find_made(path, &entry.api_version).await?,
            Verb::Delete => self.find(path, &entry.api_version).await?,
            Verb::Act => None,
        };
        let there = there.filter(|there| owner_of(there) == Some(self.owner.as_str()));
        let is_half = match (entry.verb, there) {
            (_, None) | (Verb::Act, _) => false,
            (Verb::Delete, Some(_)) => true,
            // The journal entry means that the resource was not finished, so it contains nothing yet.
            (Verb::Make, Some(there)) => {
                let settled = self.settled(path, &entry.api_version, there, &action).await?;
                settled.is_some_and(|there| is_failed(&there))
            }
        };
        match if is_half { self.delete(path, &entry.api_version).await } else { Ok(()) } {
            Ok(()) => self.journal.end(path).await.map_err(|error| error.during(&action)),
            // Azure permits it later, so the entry stays for the next recovery, or until the resource is used again.
            Err(error) if error.kind() == AzureErrorKind::Busy => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Requests the resource until it is found, or was missing [`FIND_ATTEMPTS`] times.
    async fn find_made(&self, path: &str, api_version: &str) -> Result<Option<Value>, AzureError> {
        for look in 1..=FIND_ATTEMPTS {
            if let Some(there) = self.find(path, api_version).await? {
                return Ok(Some(there));
            }
            if look < FIND_ATTEMPTS {
                self.clock.sleep(FIND_INTERVAL).await;
            }
        }
        Ok(None)
    }

    /// Polls an operation until it has ended. Returns `properties.output` of the answer, or the whole answer.
    async fn wait_for(&self, url: &str, action: &str) -> Result<Value, AzureError> {
        let begun = self.clock.now();
        loop {
            let answer = self.send(action, Method::GET, url, None, false).await?;
            let interval =
                answer.retry_after().unwrap_or(POLL_INTERVAL).clamp(POLL_INTERVAL, POLL_INTERVAL_MAX);
            match answer.status.as_u16() {
                200 => {
                    if answer.body.is_empty() {
                        return Ok(Value::Null);
                    }
                    let said = parsed(action, &answer)?;
                    match said.get("status").and_then(Value::as_str) {
                        Some("Succeeded") => {
                            let output = said.pointer("/properties/output").cloned();
                            return Ok(output.unwrap_or(said));
                        }
                        Some("Failed" | "Canceled") => return Err(failed(action, &said)),
                        Some(_) => {}
                        // The URL in `Location` returns the result itself.
                        None => return Ok(said),
                    }
                }
                202 => {}
                204 => return Ok(Value::Null),
                _ => return Err(refused(action, &answer)),
            }
            if self.clock.now().saturating_sub(begun) > OPERATION_MAX {
                return Err(late(action));
            }
            self.clock.sleep(interval).await;
        }
    }

    fn url(&self, path: &str, api_version: &str) -> String {
        self.url_with(path, api_version, "")
    }

    fn url_with(&self, path: &str, api_version: &str, query: &str) -> String {
        let separator = if query.is_empty() { "" } else { "&" };
        format!("{}{path}?api-version={api_version}{separator}{query}", self.management)
    }

    /// The tag of the body that a resource gets.
    pub(crate) fn body_tag_of(&self, resource: &Resource) -> String {
        body_tag(&self.tagged(resource))
    }

    async fn send(
        &self,
        action: &str,
        method: Method,
        url: &str,
        body: Option<Bytes>,
        is_conditional: bool,
    ) -> Result<Answer, AzureError> {
        // The token is sent to the management service only, even if an answer names another URL.
        if !url.strip_prefix(&self.management).is_some_and(|rest| rest.starts_with('/')) {
            // Without the query, which may contain a secret.
            let named = url.split('?').next().unwrap_or_default().escape_debug();
            let what = format!(
                "{action}: Azure's answer names the URL {named}, which is not on {}; the request was not sent, because it would \
                 give the token to that server: check '--management' of the connection, and any proxy in between",
                self.management
            );
            return Err(AzureError::new(AzureErrorKind::Invalid, what));
        }
        let mut is_renewed = false;
        loop {
            let token = self.tokens.token().await?;
            let odd = |what: &str| AzureError::new(AzureErrorKind::Invalid, format!("{action}: {what}"));
            let mut request = Request::new(Full::new(body.clone().unwrap_or_default()));
            *request.method_mut() = method.clone();
            *request.uri_mut() = url.parse().map_err(|_| odd("the path is not a valid URL"))?;
            let headers = request.headers_mut();
            let mut shown = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| odd("the token is not a valid header value"))?;
            shown.set_sensitive(true);
            headers.insert(AUTHORIZATION, shown);
            if body.is_some() {
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            }
            if is_conditional {
                headers.insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
            }
            let answer = self.pacer.send(action, || self.http.send(request.clone())).await?;
            if answer.status != StatusCode::UNAUTHORIZED || is_renewed {
                return Ok(answer);
            }
            self.tokens.forget(&token).await;
            is_renewed = true;
        }
    }

    fn tagged(&self, resource: &Resource) -> Value {
        let mut body = resource.body.clone();
        let digest = URL_SAFE_NO_PAD.encode(Md5::digest(body.to_string()));
        if let Some(fields) = body.as_object_mut() {
            let tags = fields.entry("tags").or_insert_with(|| json!({}));
            if let Some(tags) = tags.as_object_mut() {
                tags.insert(OWNER_TAG.to_owned(), self.owner.clone().into());
                tags.insert(BODY_TAG.to_owned(), digest.into());
            }
        }
        body
    }

    fn check_is_ours(&self, there: &Value, body: &Value, action: &str) -> Result<(), AzureError> {
        if owner_of(there) != Some(self.owner.as_str()) {
            return Err(foreign(action));
        }
        if body_tag(there) != body_tag(body) {
            let what =
                format!("{action}: a resource of this name exists, but was created from another description");
            return Err(
                AzureError::new(AzureErrorKind::Exists, what).advise("remove it first, or use another name")
            );
        }
        Ok(())
    }
}

fn owner_of(there: &Value) -> Option<&str> {
    there.pointer("/tags").and_then(|tags| tags.get(OWNER_TAG)).and_then(Value::as_str)
}

pub(crate) fn state_of(there: &Value) -> Option<&str> {
    there.pointer("/properties/provisioningState").and_then(Value::as_str)
}

pub(crate) fn is_deleting(there: &Value) -> bool {
    state_of(there) == Some("Deleting")
}

pub(crate) fn is_failed(there: &Value) -> bool {
    matches!(state_of(there), Some("Failed" | "Canceled"))
}

/// Whether Azure has begun the operation and given up, so that an incomplete resource may exist.
const fn is_half_made(kind: AzureErrorKind) -> bool {
    matches!(kind, AzureErrorKind::Failed | AzureErrorKind::Quota | AzureErrorKind::Capacity)
}

pub(crate) fn body_tag(body: &Value) -> String {
    let tag = body.pointer("/tags").and_then(|tags| tags.get(BODY_TAG)).and_then(Value::as_str);
    tag.unwrap_or_default().to_owned()
}

pub(crate) fn foreign(action: &str) -> AzureError {
    let what = format!("{action}: a resource of this name exists that this controller has not created");
    AzureError::new(AzureErrorKind::Exists, what).advise("nothing was changed; use another resource group")
}

fn vanished(action: &str) -> AzureError {
    let what =
        format!("{action}: Azure has accepted the request, but does not find the resource in five attempts");
    AzureError::new(AzureErrorKind::Unknown, what)
        .advise("try again later; if the resource exists by then, it is used")
}

fn late(action: &str) -> AzureError {
    let what = format!("{action}: Azure has not finished the operation within six hours");
    AzureError::new(AzureErrorKind::Unavailable, what)
        .advise("try again later; completed steps are not repeated")
}

fn parsed(action: &str, answer: &Answer) -> Result<Value, AzureError> {
    serde_json::from_slice(&answer.body).map_err(|error| {
        AzureError::new(AzureErrorKind::Invalid, format!("{action}: Azure's answer is not JSON: {error}"))
    })
}
