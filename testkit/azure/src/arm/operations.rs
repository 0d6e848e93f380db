//! Long operations: accepted with a URL, polled, ended with an effect on their resource.

use std::time::Duration;

use hyper::header::HeaderValue;
use serde_json::{Value, json};

use super::management::{MACHINES, Management};
use super::{Call, Reply, reply};

/// How long a NIC stays reserved for a machine that could not be created.
const RESERVED: Duration = Duration::from_secs(180);

/// After this time an operation ends though nobody polls it.
const LONGEST: Duration = Duration::from_secs(60);

/// The effect of an operation at its end.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Effect {
    Create,
    Update,
    Delete,
    /// The machine has this power state.
    Power(&'static str),
    Restart,
    Reimage,
    /// The operation returns a result.
    Output(Value),
}

#[derive(Debug)]
pub(super) struct Operation {
    pub(super) path: String,
    pub(super) effect: Effect,
    looks: usize,
    began: Duration,
    /// The error with which it ends, or `Null`.
    error: Value,
    pub(super) has_ended: bool,
}

impl Operation {
    /// An operation that will succeed.
    pub(super) fn new(path: &str, effect: Effect) -> Self {
        Self {
            path: path.to_owned(),
            effect,
            looks: 0,
            began: Duration::ZERO,
            error: Value::Null,
            has_ended: false,
        }
    }

    /// An operation that ends with this error, unless it is `Null`.
    pub(super) fn failing(self, error: Value) -> Self {
        Self { error, ..self }
    }
}

impl Management {
    /// The operation of a resource that has not ended.
    pub(super) fn active(&self, path: &str) -> Option<usize> {
        self.operations.iter().rposition(|it| it.path == path && !it.has_ended)
    }

    /// Ends an operation because another operation has begun.
    pub(super) fn preempt(&mut self, number: usize) {
        let operation = &mut self.operations[number];
        operation.has_ended = true;
        operation.error = json!({"code": "OperationPreempted", "message": "The operation has been preempted by a more recent operation."});
    }

    /// Begins an operation, and answers with its URL.
    pub(super) fn accepted(
        &mut self,
        status: u16,
        call: &Call<'_>,
        operation: Operation,
        body: &Value,
    ) -> Reply {
        self.operations.push(Operation { began: (self.clock)(), ..operation });
        let number = self.operations.len() - 1;
        self.note_creations();
        self.answer_with(status, call, number, body)
    }

    /// Answers with the URL of an operation that has begun.
    pub(super) fn accepted_again(&mut self, call: &Call<'_>, number: usize) -> Reply {
        self.answer_with(202, call, number, &Value::Null)
    }

    fn answer_with(&self, status: u16, call: &Call<'_>, number: usize, body: &Value) -> Reply {
        let region = &self.region;
        let url = format!(
            "{}/subscriptions/s/providers/Microsoft.Compute/locations/{region}/operations/{number}?api-version=1",
            call.url
        );
        let mut accepted = reply(status, body);
        let headers = accepted.headers_mut();
        let monitor = format!("{url}&monitor=true");
        headers.insert("azure-asyncoperation", HeaderValue::from_str(&url).unwrap());
        headers.insert("location", HeaderValue::from_str(&monitor).unwrap());
        if let Some(seconds) = self.retry_after_s {
            headers.insert("retry-after", HeaderValue::from(seconds));
        }
        accepted
    }

    pub(super) fn look_at(&mut self, number: usize, call: &Call<'_>) -> Reply {
        let is_monitor = call.has("monitor=true");
        if number >= self.operations.len() {
            return super::refusal(404, "NotFound", "the operation is not known");
        }
        if !self.advance(number) {
            let mut waiting = if is_monitor {
                reply(202, &Value::Null)
            } else {
                reply(200, &json!({"status": "InProgress"}))
            };
            if let Some(seconds) = self.retry_after_s {
                waiting.headers_mut().insert("retry-after", HeaderValue::from(seconds));
            }
            return waiting;
        }
        let operation = &self.operations[number];
        match (&operation.error, &operation.effect) {
            (Value::Null, Effect::Output(output)) if is_monitor => reply(200, output),
            (Value::Null, Effect::Output(output)) => {
                reply(200, &json!({"status": "Succeeded", "properties": {"output": output}}))
            }
            (Value::Null, _) if is_monitor => reply(200, &Value::Null),
            (Value::Null, _) => reply(200, &json!({"status": "Succeeded"})),
            (error, _) => reply(200, &json!({"status": "Failed", "error": error})),
        }
    }

    /// Polls the newest operation of a resource, as a `GET` of the resource does.
    pub(super) fn advance_last(&mut self, path: &str) {
        if let Some(last) = self.operations.iter().rposition(|operation| operation.path == path) {
            self.advance(last);
        }
    }

    /// Ends the operations that have lasted [`LONGEST`].
    pub(super) fn end_old(&mut self) {
        let now = (self.clock)();
        let is_old = |it: &Operation| !it.has_ended && now.saturating_sub(it.began) >= LONGEST;
        let old: Vec<usize> = (0..self.operations.len()).filter(|at| is_old(&self.operations[*at])).collect();
        old.into_iter().for_each(|number| self.end(number));
    }

    /// An operation ends at the poll number [`Self::looks`] of the operation or of its resource.
    fn advance(&mut self, number: usize) -> bool {
        let operation = &mut self.operations[number];
        operation.looks += 1;
        if !operation.has_ended && operation.looks >= self.looks {
            self.end(number);
        }
        self.operations[number].has_ended
    }

    fn end(&mut self, number: usize) {
        let operation = &mut self.operations[number];
        operation.has_ended = true;
        let (path, effect, is_failed) =
            (operation.path.clone(), operation.effect.clone(), !operation.error.is_null());
        if effect == Effect::Delete && !is_failed {
            self.end_machine(&path);
            self.remove(&path);
            return;
        }
        let is_creation = effect == Effect::Create;
        if is_creation || effect == Effect::Update || is_failed {
            let state = if is_failed { "Failed" } else { "Succeeded" };
            if let Some(there) = self.resources.get_mut(&path) {
                there["properties"]["provisioningState"] = state.into();
            }
        }
        if is_creation && is_failed && path.contains(MACHINES) {
            let until = (self.clock)() + RESERVED;
            for nic in self.nics_of(&path) {
                self.reserved.insert(nic, (path.clone(), until));
            }
        }
        if !is_failed {
            self.change_machine(&path, &effect);
        }
    }
}
