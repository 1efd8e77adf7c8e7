//! Who is asked before a request is run a second time, and what it can say.

use std::future::Future;

use bytes::Bytes;
use http::request::Parts;

use super::answer::Answer;
use super::key::IdempotencyKey;
use crate::inbox;

/// A request of which an attempt was begun and not marked as done.
#[derive(Debug, Clone)]
pub struct Question {
    key: IdempotencyKey,
    parts: Parts,
    body: Bytes,
}

impl Question {
    /// Its key: [`for_effects`](IdempotencyKey::for_effects) is what the service that takes the effects was given.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// Method, path, headers and extensions of the request that asks now. Method, path with query and body are those of the
    /// first.
    #[must_use]
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// The body of the request.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.body
    }
}

/// What the service that takes the effects says of one request.
#[derive(Debug)]
#[non_exhaustive]
pub enum Reconciled {
    /// It took effect, and this is its answer, as the handler would have given it. It is stored and given, with
    /// `Idempotency-Replayed: true`.
    Applied(Answer),
    /// It did not, and what was on its way will not any more: the request may run.
    NotApplied,
    /// It cannot be told now. Nothing runs: 409, and the next request asks again.
    StillUnknown,
}

/// Asks the service that takes the effects whether one request took effect there: as [`inbox::Reconcile`], with the request,
/// because one key is many callers' and the answer has to be made up anew.
///
/// A closure `|question| async move { … }` is one.
pub trait Reconcile: Send + Sync {
    /// Whether the request took effect. It has three quarters of [`Inbox::lease_ttl`](crate::Inbox::lease_ttl) for its answer;
    /// without one by then it is dropped, as [`Reconciled::StillUnknown`].
    fn lookup(&self, question: Question) -> impl Future<Output = Reconciled> + Send;
}

impl<F, A> Reconcile for F
where
    F: Fn(Question) -> A + Send + Sync,
    A: Future<Output = Reconciled> + Send,
{
    fn lookup(&self, question: Question) -> impl Future<Output = Reconciled> + Send {
        self(question)
    }
}

/// One request's question, as the inbox asks it.
pub(super) struct Asked<'a, R> {
    pub(super) reconcile: &'a R,
    pub(super) key: &'a IdempotencyKey,
    pub(super) parts: &'a Parts,
    pub(super) body: &'a Bytes,
    pub(super) answer_limit: usize,
}

impl<R: Reconcile> inbox::Reconcile for Asked<'_, R> {
    async fn lookup(&self, _: &str) -> inbox::Reconciled {
        let question = Question { key: self.key.clone(), parts: self.parts.clone(), body: self.body.clone() };
        match self.reconcile.lookup(question).await {
            Reconciled::Applied(answer) => match answer.to_stored(self.answer_limit) {
                Ok(outcome) => inbox::Reconciled::Applied(Some(outcome)),
                Err(error) => {
                    tracing::error!(key = self.key.as_str(), %error, "an answer cannot be written as JSON");
                    inbox::Reconciled::StillUnknown
                }
            },
            Reconciled::NotApplied => inbox::Reconciled::NotApplied,
            Reconciled::StillUnknown => inbox::Reconciled::StillUnknown,
        }
    }
}
