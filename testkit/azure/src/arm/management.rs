//! The resources of a subscription: what `GET`, `PUT` and `DELETE` do. The files beside this file have the rules of
//! single kinds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::header::HeaderValue;
use serde_json::{Value, json};

use super::address::Address;
use super::machines::MachineFacts;
use super::offers::{Family, Size};
use super::operations::{Effect, Operation};
use super::rates::{Class, Rates};
use super::{ArmFault, Call, FaultRule, LoggedRequest, Refusal, Reply, ServerClock, refusal, refuse, reply};
use crate::blob::Blob;

pub(super) const MACHINES: &str = "Microsoft.Compute/virtualMachines";
pub(super) const DISKS: &str = "Microsoft.Compute/disks";
pub(super) const VERSIONS: &str = "Microsoft.Compute/galleries/images/versions";
pub(super) const NETWORKS: &str = "Microsoft.Network/networkInterfaces";

/// The resources, and what the next requests meet.
pub struct Management {
    /// All resources by path.
    pub resources: BTreeMap<String, Value>,
    /// How many times each resource was created.
    pub created: BTreeMap<String, usize>,
    /// How many times an existing resource was changed by a `PUT`.
    pub changed: usize,
    /// The bodies of the requests for tokens.
    pub logins: Vec<String>,
    /// Whether each login is refused because of a wrong secret.
    pub is_login_refused: bool,
    /// How many requests came, without requests for tokens and blobs.
    pub requests: usize,
    /// Faults by the number of the request.
    pub faults: HashMap<usize, ArmFault>,
    /// Faults by the resource of the request.
    pub rules: Vec<FaultRule>,
    /// A new resource is not visible in the first `lag` requests.
    pub lag: usize,
    /// Lists show the state of this time ago.
    pub list_lag: Duration,
    /// The most resources in one page of a list.
    pub page_max: usize,
    /// Creations fail with this error code and message.
    pub failure: Option<(&'static str, &'static str)>,
    /// The poll at which an operation ends. It also ends after a minute.
    pub looks: usize,
    /// The `Retry-After` of an operation that has not ended.
    pub retry_after_s: Option<u64>,
    /// The poll at which a gallery version is replicated; 0: at once.
    pub replication_looks: usize,
    /// Whether the resource group does not exist.
    pub is_group_missing: bool,
    /// The rights in the group, as in `Microsoft.Authorization/permissions`.
    pub rights: Vec<String>,
    /// The region.
    pub region: String,
    /// The sizes on offer; if empty, all sizes are.
    pub sizes: Vec<Size>,
    /// The quota of families; a family without an entry has no limit.
    pub families: BTreeMap<String, Family>,
    /// Machines that exist, by path.
    pub machines: BTreeMap<String, MachineFacts>,
    /// How many requests exceeded a rate of Azure.
    pub throttled: usize,
    /// How many creations exceeded 20 for each ready replica.
    pub over_replicas: usize,
    /// The most creations of machines at one time.
    pub creations_max: usize,
    /// The disks that wait for an upload, by the number in their URL.
    pub blobs: Vec<Arc<Mutex<Blob>>>,
    /// All requests.
    pub log: Vec<LoggedRequest>,
    pub(super) clock: ServerClock,
    pub(super) operations: Vec<Operation>,
    /// The NICs that only one machine may use, and until when.
    pub(super) reserved: BTreeMap<String, (String, Duration)>,
    /// How often the replication of each version was read.
    pub(super) replication: BTreeMap<String, usize>,
    pub(super) machines_made: u64,
    unseen: BTreeMap<String, usize>,
    /// When each resource was created.
    times: BTreeMap<String, Duration>,
    /// Deleted resources that lists still show, and when they were deleted.
    ghosts: Vec<(String, Value, Duration)>,
    rates: Rates,
}

impl fmt::Debug for Management {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Management").field("resources", &self.resources).finish_non_exhaustive()
    }
}

impl Management {
    pub(super) fn new(clock: ServerClock) -> Self {
        Self {
            resources: BTreeMap::new(),
            created: BTreeMap::new(),
            changed: 0,
            logins: Vec::new(),
            is_login_refused: false,
            requests: 0,
            faults: HashMap::new(),
            rules: Vec::new(),
            lag: 0,
            list_lag: Duration::ZERO,
            page_max: 100,
            failure: None,
            looks: 2,
            retry_after_s: None,
            replication_looks: 2,
            is_group_missing: false,
            rights: vec!["*".to_owned()],
            region: "westeurope".to_owned(),
            sizes: Vec::new(),
            families: BTreeMap::new(),
            machines: BTreeMap::new(),
            throttled: 0,
            over_replicas: 0,
            creations_max: 0,
            blobs: Vec::new(),
            log: Vec::new(),
            clock,
            operations: Vec::new(),
            reserved: BTreeMap::new(),
            replication: BTreeMap::new(),
            machines_made: 0,
            unseen: BTreeMap::new(),
            times: BTreeMap::new(),
            ghosts: Vec::new(),
            rates: Rates::default(),
        }
    }

    /// How many logged requests have this method, and a path that contains the text.
    pub fn count(&self, method: &str, contains: &str) -> usize {
        self.log.iter().filter(|it| it.method == method && it.path.contains(contains)).count()
    }

    /// The different bodies of executed requests, one JSON object with `kind` and `body` on each line.
    pub(super) fn bodies(&self) -> String {
        let with_body = self.log.iter().filter(|it| (200..300).contains(&it.status) && it.body.is_object());
        let lines: BTreeSet<String> = with_body
            .filter_map(|it| match Address::of(&it.path) {
                Address::Resource { kind } | Address::ListOrAction { kind, .. } => {
                    Some(format!("{}\n", json!({"kind": kind, "body": it.body})))
                }
                _ => None,
            })
            .collect();
        lines.into_iter().collect()
    }

    /// Counts the request, and returns its fault.
    pub(super) fn next_fault(&mut self, call: &Call<'_>) -> Option<ArmFault> {
        let by_number = self.faults.get(&self.requests).copied();
        self.requests += 1;
        let subject = self.subject(call.path).to_owned();
        self.fault_of(call.method, &subject).or(by_number)
    }

    /// The fault that a rule has for a request about this subject.
    pub(super) fn fault_of(&mut self, method: &str, subject: &str) -> Option<ArmFault> {
        let fits =
            |rule: &FaultRule| rule.method.is_none_or(|it| it == method) && subject.contains(&rule.contains);
        let at = self.rules.iter().position(fits)?;
        if self.rules[at].skip > 0 {
            self.rules[at].skip -= 1;
            return None;
        }
        Some(self.rules.remove(at).fault)
    }

    /// The path of the resource that a request is about; a poll is about the resource of the operation.
    fn subject<'a>(&'a self, path: &'a str) -> &'a str {
        let operation = operation_number(path).and_then(|number| self.operations.get(number));
        operation.map_or(path, |operation| operation.path.as_str())
    }

    pub(super) fn record(&mut self, call: &Call<'_>, status: u16) {
        self.log.push(LoggedRequest {
            method: call.method.to_owned(),
            path: call.path.to_owned(),
            query: call.query.to_owned(),
            body: call.json(),
            status,
            at: (self.clock)(),
        });
    }

    pub(super) fn carry_out(&mut self, call: &Call<'_>) -> Reply {
        if let Err(wait) = self.take_rate(call) {
            self.throttled += 1;
            let mut throttled = refusal(429, "TooManyRequests", "the rate of requests is too high");
            let wait_s = HeaderValue::from(wait.as_secs() + 1);
            throttled.headers_mut().insert("retry-after", wait_s);
            return throttled;
        }
        self.dispatch(call).unwrap_or_else(|(status, code, message)| refusal(status, code, &message))
    }

    fn take_rate(&mut self, call: &Call<'_>) -> Result<(), Duration> {
        let subject = self.subject(call.path).to_owned();
        let class = match (call.method, operation_number(call.path), Address::of(call.path)) {
            (_, Some(_), _) if subject.contains(MACHINES) => Class::Operation,
            ("GET", _, Address::ListOrAction { kind, .. }) if kind == MACHINES => Class::List,
            (_, _, Address::ListOrAction { kind, .. }) if kind.starts_with(MACHINES) => Class::Update,
            ("GET", _, Address::Resource { kind }) if kind == MACHINES => Class::Get,
            ("PUT", _, Address::Resource { kind }) if kind == MACHINES => Class::Put,
            ("DELETE", _, Address::Resource { kind }) if kind == MACHINES => Class::Delete,
            _ => return Ok(()),
        };
        self.rates.take((self.clock)(), class, &subject)
    }

    fn dispatch(&mut self, call: &Call<'_>) -> Result<Reply, Refusal> {
        self.end_old();
        if let Some(number) = operation_number(call.path) {
            return Ok(self.look_at(number, call));
        }
        let address = Address::of(call.path);
        if self.is_group_missing && call.path.to_ascii_lowercase().contains("/resourcegroups/") {
            return refuse(404, "ResourceGroupNotFound", "Resource group could not be found.");
        }
        match (call.method, address) {
            ("GET", Address::Subscription) => Ok(reply(200, &json!({"id": call.path, "state": "Enabled"}))),
            ("GET", Address::Group) => {
                let (id, location) = (call.path, &self.region);
                let name = last_name(id);
                let body = json!({"id": id, "name": name, "location": location, "properties": {"provisioningState": "Succeeded"}});
                Ok(reply(200, &body))
            }
            ("GET", Address::Resource { kind }) => self.get(call, &kind),
            ("PUT", Address::Resource { kind }) => self.put(call, &kind),
            ("DELETE", Address::Resource { kind }) => self.delete(call, &kind),
            ("GET", Address::ListOrAction { kind, parent, last }) => self.list(call, &kind, &parent, &last),
            ("POST", Address::ListOrAction { parent, last, .. }) => self.act(call, &parent, &last),
            _ => refuse(405, "MethodNotAllowed", "this fake does not know the request"),
        }
    }

    fn get(&mut self, call: &Call<'_>, kind: &str) -> Result<Reply, Refusal> {
        self.advance_last(call.path);
        if let Some(left) = self.unseen.get_mut(call.path).filter(|left| **left > 0) {
            *left -= 1;
            return missing(call.path);
        }
        let Some(there) = self.resources.get(call.path) else { return missing(call.path) };
        let mut shown = there.clone();
        let expand = call.value("$expand").or_else(|| call.value("%24expand")).unwrap_or_default();
        match (kind, expand.to_ascii_lowercase().as_str()) {
            (MACHINES, expand) => self.show_machine(call.path, &mut shown, expand == "instanceview"),
            (VERSIONS, "replicationstatus") => self.show_replication(call.path, &mut shown),
            _ => {}
        }
        Ok(reply(200, &shown))
    }

    fn put(&mut self, call: &Call<'_>, kind: &str) -> Result<Reply, Refusal> {
        let mut wanted = call.json();
        if !wanted.is_object() {
            return refuse(400, "InvalidRequestContent", "the body is not a JSON object");
        }
        if self.resources.contains_key(call.path) {
            return self.update(call, kind, &wanted);
        }
        match kind {
            MACHINES => self.check_machine(call.path, &wanted)?,
            VERSIONS => self.check_version(&wanted)?,
            _ => {}
        }
        *self.created.entry(call.path.to_owned()).or_default() += 1;
        self.unseen.insert(call.path.to_owned(), self.lag);
        self.times.insert(call.path.to_owned(), (self.clock)());
        wanted["id"] = call.path.into();
        wanted["name"] = last_name(call.path).into();
        wanted["type"] = kind.into();
        wanted["properties"]["provisioningState"] = "Creating".into();
        let mut error =
            self.failure.map_or(Value::Null, |(code, message)| json!({"code": code, "message": message}));
        match kind {
            MACHINES => error = self.begin_machine(call.path, &wanted).unwrap_or(error),
            DISKS => self.begin_disk(&mut wanted),
            _ => {}
        }
        self.resources.insert(call.path.to_owned(), wanted.clone());
        let creation = Operation::new(call.path, Effect::Create).failing(error);
        // Microsoft's SDKs accept no other status of each kind.
        let status = if kind == DISKS { 202 } else { 201 };
        Ok(self.accepted(status, call, creation, &wanted))
    }

    /// A `PUT` of a resource that exists.
    fn update(&mut self, call: &Call<'_>, kind: &str, wanted: &Value) -> Result<Reply, Refusal> {
        if call.is_conditional {
            return refuse(412, "PreconditionFailed", "The resource already exists.");
        }
        let is_busy = self.active(call.path).is_some();
        if is_busy && (kind == VERSIONS || kind == MACHINES) {
            return refuse(409, "Conflict", "Another operation is in progress on the resource.");
        }
        let Some(there) = self.resources.get_mut(call.path) else { return missing(call.path) };
        let is_same = there["tags"] == wanted["tags"];
        self.changed += usize::from(!is_same);
        if is_same && kind != VERSIONS {
            return Ok(reply(200, there));
        }
        there["tags"] = wanted["tags"].clone();
        let fields = wanted["properties"].as_object().into_iter().flatten();
        for (name, value) in fields.filter(|(name, _)| kind != MACHINES || *name == "userData") {
            there["properties"][name] = value.clone();
        }
        if kind != VERSIONS {
            return Ok(reply(200, there));
        }
        there["properties"]["provisioningState"] = "Updating".into();
        let there = there.clone();
        self.replication.remove(call.path);
        Ok(self.accepted(200, call, Operation::new(call.path, Effect::Update), &there))
    }

    fn delete(&mut self, call: &Call<'_>, kind: &str) -> Result<Reply, Refusal> {
        let path = call.path;
        if !self.resources.contains_key(path) {
            return Ok(reply(204, &Value::Null));
        }
        let nested = format!("{path}/");
        if self.resources.keys().any(|it| it.starts_with(&nested)) {
            return refuse(
                409,
                "CannotDeleteResource",
                "Can not delete resource before nested resources are deleted.",
            );
        }
        if kind == NETWORKS {
            self.check_free(path)?;
        }
        let state = self.resources.get(path).and_then(|it| it.pointer("/properties/diskState"));
        if state.and_then(Value::as_str) == Some("ActiveUpload") {
            return refuse(
                409,
                "OperationNotAllowed",
                "There is an active shared access signature for the disk.",
            );
        }
        if let Some(active) = self.active(path) {
            if self.operations[active].effect == Effect::Delete {
                return Ok(self.accepted_again(call, active));
            }
            self.preempt(active);
        }
        if let Some(there) = self.resources.get_mut(path) {
            there["properties"]["provisioningState"] = "Deleting".into();
        }
        Ok(self.accepted(202, call, Operation::new(path, Effect::Delete), &Value::Null))
    }

    /// Removes a resource at the end of its deletion.
    pub(super) fn remove(&mut self, path: &str) {
        if let Some(there) = self.resources.remove(path) {
            self.ghosts.push((path.to_owned(), there, (self.clock)()));
        }
        self.times.remove(path);
    }

    fn list(&mut self, call: &Call<'_>, kind: &str, parent: &str, last: &str) -> Result<Reply, Refusal> {
        let items = match kind {
            "Microsoft.Compute/skus" => self.skus(&self.region),
            "Microsoft.Compute/locations/usages" => self.usages(),
            "Microsoft.Authorization/permissions" => vec![json!({"actions": self.rights, "notActions": []})],
            _ if last == "instanceView" => {
                let mut shown = self.resources.get(parent).cloned().unwrap_or_default();
                if shown.is_null() {
                    return missing(parent);
                }
                self.show_machine(parent, &mut shown, true);
                return Ok(reply(200, &shown["properties"]["instanceView"]));
            }
            _ => self.listed(kind, call.path),
        };
        let from = call.value("$skiptoken").and_then(|it| it.parse::<usize>().ok()).unwrap_or_default();
        let page: Vec<&Value> = items.iter().skip(from).take(self.page_max).collect();
        let mut body = json!({"value": page});
        if from + self.page_max < items.len() {
            let (url, path, next) = (call.url, call.path, from + self.page_max);
            let version = call.value("api-version").unwrap_or_default();
            body["nextLink"] = format!("{url}{path}?api-version={version}&$skiptoken={next}").into();
        }
        Ok(reply(200, &body))
    }

    /// The resources of a kind in a group, a subscription or a resource, as they were [`Self::list_lag`] ago.
    fn listed(&self, kind: &str, list: &str) -> Vec<Value> {
        let now = (self.clock)();
        let scope = list.split("/providers/").next().unwrap_or_default().to_owned() + "/";
        let is_nested = kind.matches('/').count() > 1;
        let is_listed = |path: &str| {
            let is_kind = matches!(Address::of(path), Address::Resource { kind: it } if it == kind);
            let within = if is_nested { format!("{list}/") } else { scope.clone() };
            is_kind && path.starts_with(&within)
        };
        let is_old =
            |path: &str| self.times.get(path).is_none_or(|made| now.saturating_sub(*made) >= self.list_lag);
        let there = self.resources.iter().filter(|(path, _)| is_listed(path) && is_old(path));
        let ghosts = self.ghosts.iter().filter(|(path, _, ended)| {
            is_listed(path)
                && now.saturating_sub(*ended) < self.list_lag
                && !self.resources.contains_key(path)
        });
        there.map(|it| it.1.clone()).chain(ghosts.map(|it| it.1.clone())).collect()
    }
}

/// The number of the operation that a path names.
fn operation_number(path: &str) -> Option<usize> {
    let (_, number) = path.split_once("/operations/")?;
    number.parse().ok()
}

pub(super) fn last_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

pub(super) fn missing<T>(path: &str) -> Result<T, Refusal> {
    refuse(404, "ResourceNotFound", format!("The Resource {} was not found.", last_name(path)))
}
