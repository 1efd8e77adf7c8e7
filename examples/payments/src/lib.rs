//! The example HTTP service: `POST /payments` charges at a provider, once for each `Idempotency-Key` of a tenant.
//!
//! ```text
//! POST /payments ─▶ layer (key, tenant, body) ─▶ inbox: claim by lease ─▶ handler ─▶ provider, by the key for effects
//!                                                └ left behind or failed ─▶ the provider is asked, then as above
//! GET /payments/{id} ─▶ provider: no key, no layer
//! ```
//!
//! The tenant is the header `x-tenant`, which a gateway that has authenticated the client would set, and take from the client.

pub mod provider;

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use baton_consumer::http::{Answer, Caller, Idempotency, IdempotencyLayer, Question, Reconciled};
use baton_consumer::{Inbox, inbox};
use serde::Deserialize;
use sqlx::PgPool;
use tokio::net::TcpListener;

use provider::{Charge, Provider};

/// How long work that has begun may take after the last connection was closed.
const DRAIN: Duration = Duration::from_secs(30);

/// Why the service does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The inbox could not be prepared.
    #[error("cannot migrate the inbox")]
    Migrate(#[source] baton_migrations::Error),
    /// The database did not answer, or not as it should.
    #[error("cannot prepare the database")]
    Database(#[source] sqlx::Error),
    /// The name of the inbox.
    #[error("cannot open the inbox")]
    Inbox(#[source] inbox::Error),
    /// The server ended.
    #[error("the server ended")]
    Serve(#[source] std::io::Error),
}

/// What a client asks for.
#[derive(Debug, Deserialize)]
struct Order {
    cents: i64,
}

/// Prepares the database and serves until `shutdown`, then until what was begun is done.
///
/// # Errors
///
/// [`Error`], at the start or when the listener fails.
pub async fn serve(
    listener: TcpListener,
    pool: PgPool,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let mut connection = pool.acquire().await.map_err(Error::Database)?;
    baton_migrations::migrate_inbox(&mut connection).await.map_err(Error::Migrate)?;
    drop(connection);
    let provider = Provider::open(pool.clone()).await.map_err(Error::Database)?;
    let inbox = Inbox::new("payments", pool).map_err(Error::Inbox)?;

    let asked = provider.clone();
    let lookup = move |question: Question| {
        let provider = asked.clone();
        async move { look_up(&provider, &question).await }
    };
    let layer = IdempotencyLayer::builder(inbox, Caller::from_fn(tenant), lookup).build();
    let mut running = layer.running();
    let app = Router::new()
        .route("/payments", post(pay))
        .layer(layer)
        .route("/payments/{id}", get(show))
        .with_state(provider);
    axum::serve(listener, app).with_graceful_shutdown(shutdown).await.map_err(Error::Serve)?;
    // Clients that have hung up have left their work here.
    if tokio::time::timeout(DRAIN, running.settled()).await.is_err() {
        eprintln!("{} payments are left to their leases", running.count());
    }
    Ok(())
}

fn tenant(parts: &Parts) -> Option<String> {
    Some(parts.headers.get("x-tenant")?.to_str().ok()?.to_owned())
}

/// What became of a payment that was begun and not marked as done.
async fn look_up(provider: &Provider, question: &Question) -> Reconciled {
    match provider.find(question.key().for_effects()).await {
        Ok(Some(charge)) => answer(&charge).map_or(Reconciled::StillUnknown, Reconciled::Applied),
        Ok(None) => Reconciled::NotApplied,
        Err(_) => Reconciled::StillUnknown,
    }
}

/// One answer, whether the payment was made now or found.
fn answer(charge: &Charge) -> Option<Answer> {
    let place = HeaderValue::from_str(&format!("/payments/{}", charge.id)).ok()?;
    Some(Answer::json(StatusCode::CREATED, charge).ok()?.header(header::LOCATION, place))
}

async fn pay(
    State(provider): State<Provider>,
    Extension(idempotency): Extension<Idempotency>,
    Json(order): Json<Order>,
) -> Response {
    if order.cents <= 0 {
        return (StatusCode::UNPROCESSABLE_ENTITY, "cents must be above 0").into_response();
    }
    match provider.charge(idempotency.key().for_effects(), order.cents).await {
        Ok(charge) => answer(&charge).map_or_else(
            || StatusCode::INTERNAL_SERVER_ERROR.into_response(),
            |answer| axum::http::Response::from(answer).map(Body::from),
        ),
        // It may have charged: not final, so that whoever comes next asks.
        Err(_) => StatusCode::BAD_GATEWAY.into_response(),
    }
}

async fn show(State(provider): State<Provider>, Path(id): Path<i64>) -> Response {
    match provider.get(id).await {
        Ok(Some(charge)) => Json(charge).into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(_) => StatusCode::BAD_GATEWAY.into_response(),
    }
}
